"""3x3 convolutions of images enlarged twofold by nearest neighbours, as 2x2 convolutions of the images themselves.

Of the nine pixels that such a filter meets four differ at most: rows of the filter that meet the same one are added,
and so are columns. There are four ways to lie on the pixels, hence four times the filters at a quarter of the places:
16 products instead of 36, and the enlarged image is never in memory. It is the sub-pixel convolution of Shi et al.
(2016, arXiv 1609.05158) with filters that are made of those of the layer.
"""

from __future__ import annotations

from typing import Any

import torch

from haloconv.fusion.convolutions import arguments_of, is_convolution, is_transposed, value_of

Node = torch.fx.Node
Tensor = torch.Tensor

LEAST_CHANNELS = 64
"""Fewer, of image or filters, are left: bytes decide there, and those of the rearranged result are as many as saved."""
_INTERPOLATE = torch.nn.functional.interpolate
_NAMES = ("input", "size", "scale_factor", "mode")


def convolve_before_upsampling(graph: torch.fx.GraphModule) -> int:
    """Replace such pairs in place, where nobody else reads the enlarged image; how many.

    Nothing is known of the nodes that come in yet.
    """
    found = 0
    for node in [*graph.graph.nodes]:
        enlarging = _enlarging(node) if is_convolution(node) else None
        if enlarging is None:
            continue
        given = arguments_of(node)
        with graph.graph.inserting_before(node):
            filters = graph.graph.call_function(filters_before_upsampling, (given["weight"],))
            bias = given["bias"] and graph.graph.call_method("repeat", (given["bias"], 4))
            y = graph.graph.call_function(torch.conv2d, (_image(enlarging), filters, bias, 1, 1))
            shuffled = graph.graph.call_function(shuffled_and_cut, (y,))
        y.meta.update({name: value for name, value in node.meta.items() if name != "example_value"})
        node.replace_all_uses_with(shuffled)
        graph.graph.erase_node(node)
        graph.graph.erase_node(enlarging)
        found += 1
    if found:
        graph.recompile()
    return found


def _enlarging(node: Node) -> Node | None:
    """The node that enlarges the convolution's image, if both are of this kind."""
    given = arguments_of(node)
    image, w = given["input"], value_of(given["weight"])
    if not isinstance(image, Node) or image.target is not _INTERPOLATE or set(image.users) != {node}:
        return None
    x, enlarged = value_of(_image(image)), value_of(image)
    mode = image.kwargs.get("mode", image.args[3] if len(image.args) > 3 else "nearest")
    n, c, h, width = x.shape if x.dim() == 4 else (0, 0, 0, 0)
    twofold = mode in ("nearest", "nearest-exact") and tuple(enlarged.shape) == (n, c, 2 * h, 2 * width)
    settings = [_pair(given[name]) for name in ("stride", "padding", "dilation")]
    same = given["padding"] == "same" or settings[1] == (1, 1)
    plain = settings[0] == settings[2] == (1, 1) and same and given["groups"] == 1 and not is_transposed(node, given)
    wide = w.dim() == 4 and tuple(w.shape[2:]) == (3, 3) and min(w.shape[:2]) >= LEAST_CHANNELS
    return image if twofold and plain and wide and x.dtype == enlarged.dtype else None


def _image(enlarging: Node) -> Any:
    return enlarging.kwargs.get("input", enlarging.args[0] if enlarging.args else None)


def _pair(value: Any) -> Any:
    return tuple(value) * (3 - len(value)) if isinstance(value, tuple | list) else (value, value)


def filters_before_upsampling(w: Tensor) -> Tensor:
    """(4 K, C, 2, 2) of filters w (K, C, 3, 3): first those for odd rows of the result, and of these for odd columns.

    Sums are in fp32 or more, and rounded once.
    """
    wide = w.to(torch.promote_types(w.dtype, torch.float32))
    rows = _added(wide, 2)
    both = torch.stack([each for row in rows for each in _added(row, 3)])
    return both.flatten(0, 1).to(w.dtype)


def _added(w: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Filters for odd places of the result along a dimension, whose first two taps meet one pixel; for even places."""
    first, second, third = w.unbind(dim)
    return torch.stack((first + second, third), dim), torch.stack((first, second + third), dim)


def shuffled_and_cut(y: Tensor) -> Tensor:
    """(N, K, 2 H, 2 W) of the four results y (N, 4 K, H + 1, W + 1), which lie one pixel apart."""
    n, filters, h, w = y.shape
    parts = y.unflatten(1, (2, 2, filters // 4)).permute(0, 3, 4, 1, 5, 2)  # (N, K, H + 1, 2, W + 1, 2)
    cut: Tensor = parts.reshape(n, filters // 4, 2 * h, 2 * w)[:, :, 1:-1, 1:-1]
    return cut
