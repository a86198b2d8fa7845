"""Small updates of a training step, by PyTorch's foreach operators: a kernel for those of all batch norms.

A batch norm in training mode moves two averages and a counter, and keeps the reciprocal deviation for its gradient.
Where Inductor's reduction finds the statistics, all but the counter ride along in its kernel. Where they come with the
convolution (batch_norms.py) each is a kernel of its own, of as many elements as there are channels. Inductor makes one
kernel of a foreach operator, as it does for compiled optimizers, and takes in what its operands are made of.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from haloconv.fusion.convolutions import value_of

Node = torch.fx.Node

OPTION = "foreach_updates"
"""The option of torch.compile: True for these kernels. They are off by default until they have been timed."""
_aten = torch.ops.aten
_OVER_PIXELS = [0, 2, 3]
_LEAST = 2  # of what is worth a list


def asked_by_option(value: object) -> bool:
    """What a value of the option asks for. Raises ValueError for what is no bool."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ValueError(f"options={{{OPTION!r}: ...}} is True or False, not {value!r}")


def update_together(graph: torch.fx.Graph) -> int:
    """Replace such updates in place; how many.

    They are computed before the first buffer is written, so none that comes later, or is read by others, takes part.
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
        buffers, values = (list(each) for each in zip(*updates, strict=True))
        _replace(graph, first, values, _aten._foreach_copy.default, (buffers, values))  # Inductor writes in place
        found += len(values)
    if len(deviations) >= _LEAST:
        with graph.inserting_before(first):
            flat = [
                graph.call_function(_aten.squeeze.dims, (each.args[0].args[0], _OVER_PIXELS)) for each in deviations
            ]
        for new, each in zip(flat, deviations, strict=True):
            new.meta["val"] = value_of(each)
        _replace(graph, first, deviations, _aten._foreach_rsqrt.default, (flat,))
        found += len(deviations)
    return found


def _replace(
    graph: torch.fx.Graph, before: Node, nodes: Sequence[Node], foreach: Any, operands: tuple[Any, ...]
) -> None:
    """What an operator gives of lists, in place of nodes; it stands before another one."""
    with graph.inserting_before(before):
        together = graph.call_function(foreach, operands)
        each = [graph.call_function(operator.getitem, (together, i)) for i in range(len(nodes))]
    together.meta["val"] = [value_of(node) for node in nodes]
    for new, node in zip(each, nodes, strict=True):
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not together)


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
        if (
            root.target is _aten.rsqrt.default
            and dims == _OVER_PIXELS
            and {each.op for each in node.users} == {"output"}
        ):
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
