"""Many small kernels as few, by PyTorch's foreach operators, as its optimizers have them.

Inductor makes one kernel of such an operator and takes in what its operands are made of. Four kinds are gathered:

* what our convolutions add, where it is made of parameters: biases that autocast casts, and the bias and scale of each
  filter that a batch norm in evaluation mode comes to. A convolution reads them from memory, so each is a kernel;
* what a batch norm in training mode writes, two averages and a counter, and the reciprocal deviation that it keeps for
  its gradient. Where Inductor's reduction finds the statistics all but the counter ride along in its kernel; where they
  come with the convolution (norms.py) each is a kernel of its own, of as many elements as there are channels;
* casts of weights under autocast, before the first convolution;
* casts of their gradients, some at a time: until then those in 16 bits are there beside those in fp32.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from haloconv.fusion.convolutions import value_of

Node = torch.fx.Node

_aten, _prims = torch.ops.aten, torch.ops.prims
_OVER_PIXELS = [0, 2, 3]
_LEAST = 2  # of what is worth a list
_ADDING = tuple(getattr(torch.ops.haloconv, name).default for name in ("fprop", "fprop_epilogue", "fprop_moments"))
_MOST_OF_A_VECTOR = 1 << 16  # elements
_MOST_ELEMENTS = 1 << 24  # of gradients that wait for their cast, 32 MB


def gather(graph: torch.fx.Graph) -> int:
    """Replace such nodes in place; how many."""
    return _gather_vectors(graph) + _gather_weights(graph) + _gather_gradients(graph) + _gather_norms(graph)


def _gather_vectors(graph: torch.fx.Graph) -> int:
    """What forward convolutions of ours add, if it is computed from inputs of the graph alone: before all else."""
    added = (node.args[2] for target in _ADDING for node in graph.find_nodes(op="call_function", target=target))
    made = {each: _made_of_inputs(each) for each in added if isinstance(each, Node) and _is_computed(each)}
    vectors = [each for each, nodes in made.items() if nodes]
    if len(vectors) < _LEAST:
        return 0
    moved = set().union(*(made[each] or () for each in vectors))
    return _replace(graph, _behind_first(graph, moved), vectors, _aten._foreach_copy.default, (vectors, vectors))


def _behind_first(graph: torch.fx.Graph, moved: Collection[Node]) -> Node:
    """Bring the nodes, in their order, before all others but inputs of the graph. What comes next."""
    in_order = [node for node in graph.nodes if node in moved]
    first: Node = next(node for node in graph.nodes if node.op != "placeholder" and node not in moved)
    for node in in_order:
        first.prepend(node)
    return first


def _is_computed(node: Node) -> bool:
    """Whether the node has memory of its own: it is no input, and no view of one."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and all(each.alias_info is None for each in target._schema.returns)


def _made_of_inputs(node: Node) -> set[Node] | None:
    """The nodes that compute this one, and it, if all of them are pointwise, and with the inputs that they read small.

    Empty if it is an input. What is not pointwise has kernels of its own, which no foreach operator takes in.
    """
    value = node.meta.get("val")
    known = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
    if not known or value_of(node).numel() > _MOST_OF_A_VECTOR:
        return None
    if node.op in ("placeholder", "get_attr"):
        return {node} if node.op == "get_attr" else set()
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not _is_pointwise(target):
        return None
    parts = [_made_of_inputs(each) for each in node.all_input_nodes]
    return None if None in parts else {node}.union(*(each for each in parts if each))


def _is_pointwise(target: torch._ops.OpOverload) -> bool:
    """Whether what reads a result can compute it instead."""
    again = torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable
    return again and (torch.Tag.pointwise in target.tags or target.is_view or target is _prims.iota.default)


def _gather_weights(graph: torch.fx.Graph) -> int:
    """Casts of parameters that convolutions alone read, and that are kept for gradients: so all are there at a time."""
    casts = [node for node in _casts(graph) if _is_of_weight(node)]
    if len(casts) < _LEAST:
        return 0
    return _replace(graph, _behind_first(graph, set(casts)), casts, _aten._foreach_copy.default, (casts, casts))


def _casts(graph: torch.fx.Graph) -> Sequence[Node]:
    return list(graph.find_nodes(op="call_function", target=_prims.convert_element_type.default))


def _is_of_weight(node: Node) -> bool:
    source: Any = node.args[0]
    convolutions = [user for user in node.users if user.op != "output"]
    if source.op != "placeholder" or not 0 < len(convolutions) < len(node.users):
        return False
    ours = (torch.ops.haloconv.fprop.default, torch.ops.haloconv.fprop_moments.default, _aten.convolution.default)
    return all(user.target in ours and user.args[1] is node and user.args[0] is not node for user in convolutions)


def _gather_gradients(graph: torch.fx.Graph) -> int:
    """Casts of weight gradients that the graph gives out, in lists that end behind the last of each."""
    found = 0
    for casts in _lists([node for node in _casts(graph) if _is_of_gradient(node)]):
        if len(casts) >= _LEAST:
            found += _replace(graph, casts[-1].next, casts, _aten._foreach_copy.default, (casts, casts))
    return found


def _lists(casts: Sequence[Node]) -> Iterator[list[Node]]:
    """The casts in their order, each list with as many as may wait for the last of it."""
    waiting: list[Node] = []
    elements = 0
    for node in casts:
        size = value_of(node).numel()
        if waiting and elements + size > _MOST_ELEMENTS:
            yield waiting
            waiting, elements = [], 0
        waiting.append(node)
        elements += size
    yield waiting


def _is_of_gradient(node: Node) -> bool:
    """Whether a kernel that is not Inductor's, which could take in the cast, computes what is cast."""
    source: Any = node.args[0]
    if {user.op for user in node.users} != {"output"} or [*source.users] != [node]:
        return False
    if source.target is operator.getitem:
        return source.args[0].target is _aten.convolution_backward.default
    return source.target is torch.ops.haloconv.wgrad.default


def _gather_norms(graph: torch.fx.Graph) -> int:
    """What norms write, and keep.

    It is computed before the first buffer is written, so none that comes later, or is read by others, takes part.
    """
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    if not copies:
        return 0
    place = {node: index for index, node in enumerate(graph.nodes)}
    first = min(copies, key=place.__getitem__)
    updates = [update for update in _updates(copies) if place[update[1]] < place[first]]
    deviations = [node for node in _deviations(graph) if place[node] < place[first]]
    found = 0
    if len(updates) >= _LEAST:
        buffers, values = (list(each) for each in zip(*updates, strict=True))  # Inductor writes in place
        found += _replace(graph, first, values, _aten._foreach_copy.default, (buffers, values))
    if len(deviations) >= _LEAST:
        variances = [each.args[0].args[0] for each in deviations]
        with graph.inserting_before(first):
            flat = [graph.call_function(_aten.squeeze.dims, (each, _OVER_PIXELS)) for each in variances]
        for new, each in zip(flat, deviations, strict=True):
            new.meta["val"] = value_of(each)
        found += _replace(graph, first, deviations, _aten._foreach_rsqrt.default, (flat,))
    return found


def _updates(copies: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """Buffers and their new values, which nobody else reads: counters, and averages that take in our statistics."""
    for copy in copies:
        buffer, value, *rest = copy.args
        if rest or not (isinstance(buffer, Node) and isinstance(value, Node)) or [*value.users] != [copy]:
            continue
        if value.target is not _aten.add.Tensor or value.kwargs:
            continue
        operands = value.args
        counts = operands[0] is buffer and isinstance(operands[1], int)
        if counts or any(_is_measured(each) for each in operands):
            forms = {(value_of(each).shape, value_of(each).dtype) for each in (buffer, value)}
            if len(forms) == 1:
                yield buffer, value


def _deviations(graph: torch.fx.Graph) -> Iterator[Any]:
    """Reciprocal deviations (K,) that only the graph's gradient reads: the norm itself finds them again on its way."""
    for node in graph.find_nodes(op="call_function", target=_aten.squeeze.dims):
        root, dims = node.args
        kept = {each.op for each in node.users} == {"output"}
        if kept and root.target is _aten.rsqrt.default and dims == _OVER_PIXELS:
            variance = root.args[0]
            if variance.target is _aten.add.Tensor and _is_measured(variance.args[0]):
                yield node


def _is_measured(node: Any) -> bool:
    """Whether a node is a statistic of a convolution of ours, but for factors and its form."""
    while isinstance(node, Node) and node.target in (_aten.mul.Tensor, _aten.squeeze.dims):
        if node.target is _aten.mul.Tensor and isinstance(node.args[1], Node):
            return False
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return False
    source: Any = node.args[0]
    return source.target is torch.ops.haloconv.fprop_moments.default


def _replace(
    graph: torch.fx.Graph, before: Node, nodes: Sequence[Node], foreach: Any, operands: tuple[list[Node], ...]
) -> int:
    """What an operator gives of lists, in place of nodes; it stands before another one. How many nodes there are."""
    with graph.inserting_before(before):
        together = graph.call_function(foreach, operands)
        each = [graph.call_function(operator.getitem, (together, i)) for i in range(len(nodes))]
    together.meta["val"] = [value_of(node) for node in nodes]
    for new, node in zip(each, nodes, strict=True):
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not together)
    return len(nodes)
