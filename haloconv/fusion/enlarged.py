"""Images that a training graph enlarges by nearest neighbours, as expanded views: their gradients are sums of blocks.

Inductor takes ``interpolate`` apart into a gather before autograd sees it, so that the gradient scatters: it adds each
pixel to its place in an fp32 image of zeros by an atomic operation, and copies that to the image's dtype. An expanded
view has the same values, and its gradient is a sum over the pixels that one was copied to, without atomics and in one
order. In a U-Net's step the scatters took a quarter of the time (docs/notebook.md#compiled-graphs).
"""

from __future__ import annotations

from typing import Any

import torch

from haloconv.fusion.convolutions import is_known_image, replace_node, value_of
from haloconv.layout import is_channels_last

Node = torch.fx.Node
Tensor = torch.Tensor

INTERPOLATE = torch.nn.functional.interpolate
NEAREST = ("nearest", "nearest-exact")


def mode_of(node: Node) -> Any:
    """How a node that calls ``interpolate`` does it."""
    return node.kwargs.get("mode", node.args[3] if len(node.args) > 3 else "nearest")


def image_of(node: Node) -> Any:
    """What a node that calls ``interpolate`` enlarges."""
    return node.kwargs.get("input", node.args[0] if node.args else None)


def enlarge_by_views(graph: torch.fx.GraphModule) -> int:
    """Replace such calls in place, where a gradient will be asked for; how many."""
    found = 0
    for node in [*graph.graph.nodes]:
        factors = _factors_of(node) if node.target is INTERPOLATE else None
        if factors is None:
            continue
        replace_node(graph.graph, node, enlarged, (image_of(node), *factors, value_of(node).dtype))
        found += 1
    if found:
        graph.recompile()
    return found


def _factors_of(node: Node) -> tuple[int, int] | None:
    """How many times as many rows and columns the result has, powers of two; None for what is left.

    For these a row of the result is exactly of the row before it by division, however PyTorch rounds the quotient.
    """
    x: Any = value_of(image_of(node))
    y: Any = value_of(node)
    if mode_of(node) not in NEAREST or not (is_known_image(x) and is_known_image(y)):
        return None
    if not y.requires_grad or _order_of(x) is None or _order_of(x) != _order_of(y):
        return None
    factors = y.shape[2] // x.shape[2], y.shape[3] // x.shape[3]
    whole = [extent * factor for extent, factor in zip(x.shape[2:], factors, strict=True)] == [*y.shape[2:]]
    copies = any(min(each) > 1 for each in zip(x.shape[2:], factors, strict=True))  # a view of x would be x itself
    return factors if whole and copies and all(each & (each - 1) == 0 for each in factors) else None


def _order_of(x: Tensor) -> str | None:
    """The memory order in which the image is dense, if it is in one."""
    if is_channels_last(tuple(x.shape), x.stride()):
        return "nhwc"
    return "nchw" if x.is_contiguous() else None


def enlarged(x: Tensor, down: int, across: int, dtype: torch.dtype) -> Tensor:
    """(N, C, down H, across W) of x (N, C, H, W) in its memory order, each pixel in so many rows and columns.

    ``dtype`` is that of the result: on GPUs autocast enlarges in fp32.
    """
    n, c, h, w = x.shape
    x = x.to(dtype)
    if not is_channels_last((n, c, h, w), x.stride()):
        tall = x[:, :, :, None, :, None].expand(n, c, h, down, w, across)
        return tall.reshape(n, c, h * down, w * across)
    wide = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, down, w, across, c)
    return wide.reshape(n, h * down, w * across, c).permute(0, 3, 1, 2)
