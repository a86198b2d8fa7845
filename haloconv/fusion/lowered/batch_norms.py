"""Statistics of batch norms in training mode, found by the kernel that stores what is normed.

Inductor takes such a norm apart: mean and variance of each channel are a reduction that reads the whole image again,
in two launches and a third for what is left. Where a forward convolution of ours measures what it stores
(haloconv.moments), its operator stands for both. This is done behind autograd, which knows the norm as it was: in the
graph that Inductor lowers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from haloconv import moments
from haloconv.fusion.convolutions import value_of
from haloconv.problem import ConvSpec

Node = torch.fx.Node

_aten, _prims = torch.ops.aten, torch.ops.prims
_OVER_PIXELS = [0, 2, 3]
_LEAST_BYTES = 256
"""Fewer of a pixel are left: 64 channels in bf16 at 56x56 take a reduction 7.5 us, and this kernel 10 more (H200)."""


def replace_statistics(graph: torch.fx.Graph) -> int:
    """Replace such pairs in place; how many."""
    found = 0
    for node in [*graph.find_nodes(op="call_function", target=_aten.var_mean.correction)]:
        conv = _measured_by(node)
        if conv is None:
            continue
        x, w, _, *values = conv.args
        with graph.inserting_before(conv):
            both = graph.call_function(torch.ops.haloconv.fprop_moments.default, (x, w, *values))
            y, variance, mean = (graph.call_function(operator.getitem, (both, i)) for i in range(3))
        both.meta["val"] = (value_of(conv), *node.meta["val"])
        for new, value in zip((y, variance, mean), both.meta["val"], strict=True):
            new.meta["val"] = value
        for user in [*node.users]:
            user.replace_all_uses_with((variance, mean)[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        conv.replace_all_uses_with(y)
        graph.erase_node(conv)
        found += 1
    return found


def _measured_by(node: Node) -> Node | None:
    """The convolution whose statistics the node is, if they are those that our kernel finds."""
    values, dims, *rest = (*node.args, None)
    biased = node.kwargs.get("correction") == 0 and node.kwargs.get("keepdim") is True
    if rest != [None] or dims != _OVER_PIXELS or not biased or not isinstance(values, Node):
        return None
    if values.target is _prims.convert_element_type.default and values.args[1] == torch.float32:
        values = values.args[0]
    if not isinstance(values, Node) or values.target is not torch.ops.haloconv.fprop.default:
        return None
    given: tuple[Any, ...] = values.args
    x, w, b, stride, padding, dilation, *others = given
    if b is not None or any(user.target is not operator.getitem for user in node.users):
        return None
    forms = [value_of(each) for each in (x, w, values)]
    known = all(isinstance(size, int) for each in forms for size in (*each.shape, *each.stride()))
    if not known or forms[0].dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    if forms[1].shape[0] * forms[0].dtype.itemsize < _LEAST_BYTES:
        return None
    spec = ConvSpec(tuple(stride), tuple(padding), tuple(dilation), *others)
    return values if moments.has_moments(forms[0], forms[1], spec) else None
