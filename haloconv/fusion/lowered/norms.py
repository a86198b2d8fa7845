"""Statistics of batch norms in training mode and of group norms, found by the kernel that stores what is normed.

Inductor takes a batch norm apart: mean and variance of each channel are a reduction that reads the whole image again,
in two launches and a third for what is left. So are those of each image's channels, of which fusion/group_norms.py
makes a group norm in channels_last. Where a forward convolution of ours measures what it stores (haloconv.moments), its
operator stands for both. This is done behind autograd, which knows the norm as it was: in the graph that Inductor
lowers.
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
_OVER_PIXELS, _OF_IMAGES = [0, 2, 3], [2, 3]
_LEAST_BYTES = 256
"""Fewer of a pixel are left: 64 channels in bf16 at 56x56 take a reduction 7.5 us, and this kernel 10 more (H200)."""


def replace_statistics(graph: torch.fx.Graph) -> int:
    """Replace such pairs in place; how many."""
    found = 0
    for node in [*graph.find_nodes(op="call_function", target=_aten.var_mean.correction)]:
        measured = _measured_by(node)
        if measured is None:
            continue
        conv, arguments = measured
        with graph.inserting_before(conv):
            both = graph.call_function(torch.ops.haloconv.fprop_moments.default, arguments)
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


def _measured_by(node: Node) -> tuple[Node, tuple[Any, ...]] | None:
    """The convolution whose statistics the node is, if our kernel finds them, and the arguments of what does."""
    values, dims, *rest = (*node.args, None)
    biased = node.kwargs.get("correction") == 0 and node.kwargs.get("keepdim") is True
    if rest != [None] or dims not in (_OVER_PIXELS, _OF_IMAGES) or not biased or not isinstance(values, Node):
        return None
    if values.target is _prims.convert_element_type.default and values.args[1] == torch.float32:
        values = values.args[0]
    parts = _parts_of(values) if isinstance(values, Node) else None
    if not isinstance(values, Node) or parts is None or any(user.target is not operator.getitem for user in node.users):
        return None
    x, w, b, residual, (stride, padding, dilation, *others) = parts
    forms = [value_of(each) for each in (x, w, values)]
    known = all(isinstance(size, int) for each in forms for size in (*each.shape, *each.stride()))
    if not known or forms[0].dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    if forms[1].shape[0] * forms[0].dtype.itemsize < _LEAST_BYTES:
        return None
    spec = ConvSpec(tuple(stride), tuple(padding), tuple(dilation), *others)
    adds = {"has_bias": b is not None, "has_residual": residual is not None}
    per_image = dims == _OF_IMAGES
    if not moments.has_moments(forms[0], forms[1], spec, **adds, per_image=per_image):
        return None
    return values, (x, w, b, residual, per_image, stride, padding, dilation, *others)


def _parts_of(conv: Node) -> tuple[Any, ...] | None:
    """x, w, bias, residual and the other arguments of a forward convolution of ours; None of any other node."""
    if conv.target is torch.ops.haloconv.fprop.default:
        x, w, b, *values = conv.args
        return x, w, b, None, values
    if conv.target is not torch.ops.haloconv.fprop_epilogue.default:
        return None
    x, w, b, residual, has_scale, activation, *values = conv.args
    return None if has_scale or activation else (x, w, b, residual, values)
