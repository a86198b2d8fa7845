"""A graph whose images are brought to channels_last in front of its convolutions, as if its caller had done it.

What lies between convolutions follows by PyTorch's own rules: elementwise operations, norms, pooling and additions keep
the memory order of what they read. Results of the graph are brought back, so that nobody outside sees a difference. The
graph is run once on tensors without data to learn what becomes of it; where more than that would change, it stays as it
was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch._subclasses import FakeTensor

Node = torch.fx.Node
Graph = torch.fx.GraphModule

_MODULES = ("torch", "torch.nn.functional", "torch._C._nn", "_operator", "math", "builtins", "torch.functional")
"""Where functions come from that take an image in any memory order, and leave nothing behind but their result."""
_NAMESPACES = ("aten", "prims", "haloconv", "torchvision")
"""Namespaces of operators for which that holds, too."""
_READS_STRIDES = ("as_strided", "as_strided_", "set_", "resize_", "resize_as_", "stride", "is_contiguous", "data_ptr")
_ENTERS, _EXITS = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_KEPT = (_ENTERS, _EXITS, torch._C._set_grad_enabled)
"""Functions that leave something behind, which `_Run` undoes."""


class ChannelsLast:
    """What was changed in a graph: nodes that were inserted, and what is known of each node since."""

    def __init__(self, graph: Graph, inserted: list[Node], known: Mapping[Node, Any]) -> None:
        self._graph, self._inserted = graph, inserted
        self._before = {node: node.meta.get("example_value") for node in known}
        for node, value in known.items():
            node.meta["example_value"] = value

    def undo(self) -> None:
        """Leave the graph as it was."""
        _erase(self._inserted)
        for node, value in self._before.items():
            node.meta["example_value"] = value
        self._graph.recompile()


def bring_to_channels_last(graph: Graph, convolutions: Mapping[Node, Node]) -> ChannelsLast | str:
    """Bring images to channels_last in front of convolutions, given as the node of each and that of its image.

    ``meta["example_value"]`` of nodes is what torch.compile knows of them, before and after. A sentence if it cannot be
    done: why not.
    """
    reason = next(_obstacles(graph), None)
    if reason is not None:
        return reason
    (output,) = graph.graph.find_nodes(op="output")
    views = {each: _flat_and_back(graph, each, output) for each in _differentiated(graph, convolutions)}
    images = []
    for node, image in convolutions.items():
        image = views[image][-1] if image in views else image
        images.append(_copied(graph, image, node, torch.channels_last))
    results = [each for each in output.all_input_nodes if isinstance(_known(each), torch.Tensor)]
    restored = {each: _copied(graph, each, output, torch.contiguous_format) for each in results}
    inserted = [*chain(*views.values()), *images, *restored.values()]
    run = _Run(graph)
    try:
        run.run_on_what_is_known()
        reason = next(_changes(run.known, restored), None)
    except Exception as error:  # whatever an operation says of strides that it does not take
        reason = f"an operation would fail: {str(error).strip().partition(chr(10))[0]}"
    if reason is not None:
        _erase(inserted)
        return f"in channels_last {reason}"
    gone = {copied for result, copied in restored.items() if _lies_alike(run.known[result], _known(result))}
    gone |= {copied for copied in images if _lies_alike(run.known[copied], run.known[_source(copied)])}
    _erase([each for each in inserted if each in gone])
    graph.recompile()
    known = {node: value for node, value in run.known.items() if node.op != "placeholder" and node not in gone}
    return ChannelsLast(graph, [each for each in inserted if each not in gone], known)


def _differentiated(graph: Graph, convolutions: Mapping[Node, Node]) -> list[Node]:
    """Contiguous inputs of the graph whose gradients might come in channels_last: all but weights of convolutions."""
    weights = {each for node in convolutions for each in node.all_input_nodes if each is not convolutions[node]}
    return [
        node
        for node in graph.graph.find_nodes(op="placeholder")
        if _is_tensor(value := _known(node)) and value.requires_grad and value.dim() == 4 and value.is_contiguous()
        if node not in weights
    ]


def _flat_and_back(graph: Graph, tensor: Node, output: Node) -> tuple[Node, Node]:
    """Two views that are the tensor again for all but the output: the gradient of a view is contiguous."""
    readers = [each for each in tensor.users if each is not output]
    with graph.graph.inserting_after(graph.graph.find_nodes(op="placeholder")[-1]):
        flat = graph.graph.call_method("view", (tensor, -1))
    with graph.graph.inserting_after(flat):
        back = graph.graph.call_method("view", (flat, *_known(tensor).shape))
    for reader in readers:
        reader.replace_input_with(tensor, back)
    return flat, back


def _copied(graph: Graph, tensor: Node, reader: Node, memory_format: torch.memory_format) -> Node:
    """A copy in front of what reads the tensor, in its place. It is none where the tensor lies so already."""
    with graph.graph.inserting_before(reader):
        copied = graph.graph.call_method("contiguous", (tensor,), {"memory_format": memory_format})
    reader.replace_input_with(tensor, copied)
    return copied


def _erase(inserted: Sequence[Node]) -> None:
    for node in reversed(inserted):
        node.replace_all_uses_with(_source(node))
        node.graph.erase_node(node)


def _source(inserted: Node) -> Node:
    """The node that an inserted one reads."""
    source = inserted.args[0]
    assert isinstance(source, Node)
    return source


def _known(node: Node) -> Any:
    return node.meta.get("example_value")


def _obstacles(graph: Graph) -> Iterator[str]:
    """Sentences: what of a graph may tell memory orders apart, or is not known before it runs."""
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output", "call_function", "call_method"):
            yield f"the graph has a {node.op} of {node.target}"
        elif node.op in ("call_function", "call_method") and not _takes_any_order(node):
            yield f"the graph calls {node.target}, which may ask for a memory order"
        elif not _is_static(_known(node)):
            yield "extents are known only when it runs"


def _takes_any_order(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        namespace, _, name = str(target).partition(".")
        return namespace in _NAMESPACES and name.partition(".")[0] not in _READS_STRIDES
    if isinstance(target, str):
        return target not in _READS_STRIDES
    known = target in _KEPT or getattr(target, "__module__", None) in _MODULES
    return known and getattr(target, "__name__", "") not in _READS_STRIDES


def _is_static(value: object) -> bool:
    """Whether no symbol stands in what is known of a node, and tensors have no data."""
    if isinstance(value, tuple | list):
        return all(_is_static(each) for each in value)
    if isinstance(value, torch.Tensor):
        is_strided = isinstance(value, FakeTensor) and value.layout == torch.strided
        return is_strided and all(isinstance(each, int) for each in (*value.shape, *value.stride()))
    return not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


class _Run(torch.fx.Interpreter):
    """A run of a graph on tensors without data that are as its inputs. ``known`` has the value of each node."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._inputs = graph.graph.find_nodes(op="placeholder")
        self.known: dict[Node, Any] = {}
        self._entered: list[torch.amp.autocast_mode.autocast] = []

    def run_on_what_is_known(self) -> None:
        """Raises what an operation raises. Autocast and the recording of gradients are then as they were."""
        given = [_known(node) for node in self._inputs]
        mode = next((each.fake_mode for each in given if isinstance(each, FakeTensor)), None)
        if mode is None:
            raise RuntimeError("nothing is known of the inputs")
        alike = [each.detach().requires_grad_(each.requires_grad) if _is_tensor(each) else each for each in given]
        try:
            with mode, torch.set_grad_enabled(torch.is_grad_enabled()):
                self.run(*alike)
        finally:
            while self._entered:
                self._entered.pop().__exit__(None, None, None)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.target is _ENTERS:
            self._entered.append(value)
        elif n.target is _EXITS:
            self._entered.pop()
        if n.op != "output":
            self.known[n] = value
        return value


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _changes(known: Mapping[Node, Any], restored: Mapping[Node, Node]) -> Iterator[str]:
    """Sentences: what would be different for who calls the graph."""
    storages = [_storage(known[node]) for node in known if node.op == "placeholder" and _is_tensor(known[node])]
    storages += [_storage(known[each]) for each in restored]
    for each in restored:
        before, after = _known(each), known[each]
        if (before.shape, before.dtype, before.requires_grad) != (after.shape, after.dtype, after.requires_grad):
            yield f"{each} would be another tensor"
        elif not _lies_alike(before, after):
            if not before.is_contiguous():
                yield f"{each}, a result, would lie in another order"
            elif storages.count(_storage(after)) > 1:
                yield f"{each}, a result, would share no memory any more with another tensor"


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether strides are the same wherever they mean anything."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(extent < 2 or a == b for extent, a, b in steps)
