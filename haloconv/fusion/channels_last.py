"""A graph whose images are brought to channels_last in front of its convolutions, as if its caller had done it.

What lies between convolutions follows by PyTorch's own rules: elementwise operations, norms, pooling and additions keep
the memory order of what they read. Results of the graph are brought back, so that nobody outside sees a difference. All
is done to a copy of the graph, which is run on tensors without data to learn what becomes of it; where more than
strides inside of it would change, the copy is of no use.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor

from haloconv.fusion.convolutions import value_of

Node = torch.fx.Node
Graph = torch.fx.GraphModule

_MODULES = ("torch", "torch.nn.functional", "torch._C._nn", "_operator", "math", "builtins", "torch.functional")
"""Where functions come from that take an image in any memory order, and leave nothing behind but their result."""
_NAMESPACES = ("aten", "prims", "haloconv", "torchvision")
"""Namespaces of operators for which that holds, too."""
_READS_STRIDES = ("as_strided", "as_strided_", "set_", "resize_", "resize_as_", "stride", "is_contiguous", "data_ptr")
_ENTERS, _EXITS = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_KEPT = (_ENTERS, _EXITS, torch._C._set_grad_enabled, torch._C._log_api_usage_once)
"""Functions that leave something behind, which `Propagation` undoes, or which does not matter."""


class LayoutError(Exception):
    """A graph cannot run in another memory order without a difference outside of it; the message says why."""


def copy_of(graph: Graph) -> Graph:
    """A copy of the graph. ``meta["example_value"]`` of its nodes is what torch.compile knows of them, as there.

    Raises LayoutError for a graph of which it is not known what another memory order changes.
    """
    reason = next(_obstacles(graph), None)
    if reason is not None:
        raise LayoutError(reason)
    copied = Graph(graph, copy.deepcopy(graph.graph))
    for node, twin in zip(graph.graph.nodes, copied.graph.nodes, strict=True):
        for name in vars(node).keys() - vars(twin).keys():  # torch.compile keeps sources of inputs so
            setattr(twin, name, getattr(node, name))
    return copied


def note_values(graph: Graph, run: Propagation) -> None:
    """Let ``meta["example_value"]`` of all nodes of the graph but inputs be what this run of it gave."""
    for node, value in run.known.items():
        if node.op != "placeholder":
            node.meta["example_value"] = value


def bring_to_channels_last(copied: Graph, was: Propagation, read: Mapping[Node, Sequence[Node]]) -> None:
    """Let convolutions of the copy, the keys, read these tensors of theirs in channels_last, in place.

    ``was`` is the run of the graph that it is a copy of; some nodes may have been replaced since. Raises LayoutError if
    an operation would fail, or something written in place be read elsewhere than there.
    """
    views = {each: _read_through_views(copied, each) for each in _differentiated(copied, read)}
    inserted = [
        _insert_copy(copied, convolution, views.get(each, each), torch.channels_last)
        for convolution, tensors in read.items()
        for each in tensors
    ]
    after = propagated(copied)
    names = {each.name for each in was.known} & {each.name for each in after.known}
    if was.written(names) != after.written(names):
        raise LayoutError("what is written in place would be read elsewhere than now")
    note_values(copied, after)
    for each in inserted:
        (source,) = each.all_input_nodes
        if _lies_alike(value_of(each), value_of(source)):
            each.replace_all_uses_with(source)
            copied.graph.erase_node(each)


def bring_results_back(copied: Graph, was: Propagation) -> None:
    """Let results of the copy lie as those of the graph whose run it was, in place.

    Raises LayoutError if anything else is different.
    """
    would_be = propagated(copied)
    both = zip(was.results, would_be.results, strict=True)
    pairs = [(node, twin) for node, twin in both if _is_tensor(was.known[node])]
    before = [was.known[node] for node, _ in pairs]
    after = [would_be.known[twin] for _, twin in pairs]
    sharing = was.sharing([node for node, _ in pairs])
    if sharing != would_be.sharing([twin for _, twin in pairs]):
        raise LayoutError("results of the graph would share memory with others than now")
    for i, (one, other) in enumerate(zip(before, after, strict=True)):
        if (one.shape, one.dtype, one.requires_grad) != (other.shape, other.dtype, other.requires_grad):
            raise LayoutError(f"{pairs[i][0]}, a result, would be another tensor")
        if not _lies_alike(one, other):
            order = _order_of(one)
            if order is None or sharing.count(sharing[i]) > 1 or sharing[i] < 0:
                raise LayoutError(f"{pairs[i][0]}, a result, would lie in another order")
            _insert_copy(copied, would_be.returning, pairs[i][1], order)


def _order_of(tensor: torch.Tensor) -> torch.memory_format | None:
    """The memory format that the tensor is dense in, if it is in one."""
    orders = (torch.contiguous_format, *([torch.channels_last] if tensor.dim() == 4 else []))
    return next((each for each in orders if tensor.is_contiguous(memory_format=each)), None)


def _obstacles(graph: Graph) -> Iterator[str]:
    """Sentences: what of a graph may tell memory orders apart, or is not known before it runs."""
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output", "call_function", "call_method"):
            yield f"the graph has a {node.op} of {node.target}"
        elif node.op in ("call_function", "call_method") and not _takes_any_order(node):
            yield f"the graph calls {node.target}, which may ask for a memory order"
        elif not _is_static(value_of(node)):
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


def _differentiated(graph: Graph, wanted: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Contiguous inputs of the graph whose gradients might come in channels_last: all but other weights of these."""
    weights = {each for convolution, own in wanted.items() for each in convolution.all_input_nodes if each not in own}
    return [
        node
        for node in graph.graph.find_nodes(op="placeholder")
        if _is_tensor(value := value_of(node)) and value.requires_grad and value.dim() == 4 and value.is_contiguous()
        if node not in weights
    ]


def _read_through_views(graph: Graph, tensor: Node) -> Node:
    """Two views in a row, the same tensor again, for all readers but the output: gradients of views are contiguous."""
    readers = [each for each in tensor.users if each.op != "output"]
    with graph.graph.inserting_after(graph.graph.find_nodes(op="placeholder")[-1]):
        flat = graph.graph.call_method("view", (tensor, -1))
    with graph.graph.inserting_after(flat):
        back = graph.graph.call_method("view", (flat, *value_of(tensor).shape))
    for reader in readers:
        reader.replace_input_with(tensor, back)
    return back


def _insert_copy(graph: Graph, reader: Node, tensor: Node, order: torch.memory_format) -> Node:
    """A copy in this memory order in front of what reads the tensor; it is none where the tensor lies so already."""
    with graph.graph.inserting_before(reader):
        inserted = graph.graph.call_method("contiguous", (tensor,), {"memory_format": order})
    reader.replace_input_with(tensor, inserted)
    return inserted


def propagated(graph: Graph) -> Propagation:
    """The run of a graph on tensors without data. Raises LayoutError if it does not run."""
    run = Propagation(graph)
    try:
        run.propagate()
    except Exception as error:  # whatever an operation says of strides that it does not take
        raise LayoutError(f"an operation would fail: {str(error).strip().partition(chr(10))[0]}") from error
    return run


class Propagation(torch.fx.Interpreter):
    """A run of a graph on tensors without data that are as its inputs.

    ``known`` has the value of each node but the last, ``returning``, which reads ``results``.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._inputs = graph.graph.find_nodes(op="placeholder")
        (self.returning,) = graph.graph.find_nodes(op="output")
        self.results: list[Node] = []
        torch.fx.map_arg(self.returning.args[0], self.results.append)
        self.known: dict[Node, Any] = {}
        self._written: dict[str, set[str]] = {}
        self._entered: list[torch.amp.autocast_mode.autocast] = []

    def propagate(self) -> None:
        """Raises what an operation raises. Autocast and the recording of gradients are then as they were."""
        given = [value_of(node) for node in self._inputs]
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

    def sharing(self, results: Sequence[Node]) -> list[int]:
        """For each result a number that it has with all that share its memory, below 0 if an input does."""
        numbers: dict[int, int] = {}
        for i, node in enumerate(self._inputs):
            if _is_tensor(self.known[node]):
                numbers.setdefault(_storage(self.known[node]), i - len(self._inputs))
        return [numbers.setdefault(_storage(self.known[node]), i) for i, node in enumerate(results)]

    @property
    def all_written(self) -> set[str]:
        """The names of all nodes that have what something behind them writes in place."""
        return {name for found in self._written.values() for name in found}

    def written(self, names: Collection[str]) -> dict[str, set[str]]:
        """For each node that writes in place, which nodes before it have what it writes, of those with these names."""
        return {name: found & set(names) for name, found in self._written.items() if name in names}

    def run_node(self, n: Node) -> Any:
        read: list[torch.Tensor] = [self.known[each] for each in n.all_input_nodes if _is_tensor(self.known.get(each))]
        versions = [each._version for each in read]
        value = super().run_node(n)
        written = {_storage(each) for each, was in zip(read, versions, strict=True) if each._version != was}
        if written:
            before = ((node, each) for node, each in self.known.items() if _is_tensor(each))
            self._written[n.name] = {node.name for node, each in before if _storage(each) in written}
        if n.target is _ENTERS:
            self._entered.append(value)
        elif n.target is _EXITS:
            self._entered.pop()
        if n.op != "output":
            self.known[n] = value
        return value


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether strides are the same wherever they mean anything."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(extent < 2 or a == b for extent, a, b in steps)
