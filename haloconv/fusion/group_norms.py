"""Group norms of channels_last images in a graph, as statistics of channels first and of groups then.

In channels_last the channels of a group are neighbours in memory, and those of the next pixel are far away. A reduction
over channels and pixels together, which group norm is to a compiler, reads few bytes from each place. Reduced over
pixels alone, all channels at once, memory is read in order; statistics of groups come from those of their channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from haloconv.fusion.convolutions import is_known_image, replace_node
from haloconv.layout import is_channels_last

Tensor = torch.Tensor

_aten = torch.ops.aten
_NAMES = ("input", "num_groups", "weight", "bias", "eps")
_NORMS = (torch.nn.functional.group_norm, torch.group_norm, _aten.group_norm, _aten.group_norm.default)


def norms_by_channel(graph: torch.fx.GraphModule, value_of: Callable[[Any], Any]) -> int:
    """Replace group norms of channels_last images in place; how many. ``value_of(node)`` is what is known of a node."""
    found = 0
    for node in [*graph.graph.nodes]:
        if node.op != "call_function" or node.target not in _NORMS:
            continue
        given = {"weight": None, "bias": None, "eps": 1e-5} | dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
        x, y = value_of(given["input"]), value_of(node)
        if not is_known_image(x) or not is_known_image(y) or not is_channels_last(tuple(x.shape), x.stride()):
            continue
        arguments = (*(given[name] for name in _NAMES), y.dtype)
        replace_node(graph.graph, node, group_norm_by_channel, arguments)
        found += 1
    if found:
        graph.recompile()
    return found


def group_norm_by_channel(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    """torch.nn.functional.group_norm of x (N, C, H, W) in ``dtype``; sums are in fp32, or fp64 of fp64.

    Variances of groups are made of those of channels and of squared differences of means, so that nothing cancels
    (Chan, Golub, LeVeque 1979).
    """
    n, c = x.shape[:2]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    of_channels = torch.var_mean(wide, (2, 3), correction=0, keepdim=True)  # as lowered/norms.py finds it
    variances, means = (each.view(n, num_groups, -1) for each in of_channels)
    mean = means.mean(2, keepdim=True)
    variance = variances.mean(2, keepdim=True) + (means - mean).square().mean(2, keepdim=True)
    scale, shift = torch.rsqrt(variance + eps).expand(means.shape).reshape(n, c), mean.expand(means.shape).reshape(n, c)
    scale = scale if weight is None else scale * weight
    shift = -shift * scale if bias is None else bias - shift * scale
    y: Tensor = (wide * scale[:, :, None, None] + shift[:, :, None, None]).to(dtype)
    return y
