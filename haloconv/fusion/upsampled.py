"""3x3 convolutions of images enlarged twofold by nearest neighbours, as convolutions of the images themselves.

Of the nine pixels that such a filter meets four differ at most: rows of the filter that meet the same one are added,
and so are columns. There are four ways to lie on the pixels, hence four times the filters at a quarter of the places:
16 products instead of 36, and the enlarged image is never in memory. The four results are put beside each other by a
copy, as in the sub-pixel convolution of Shi et al. (2016, arXiv 1609.05158). A transposed 4x4 convolution of stride 2
has the same products and needs no copy: it was 1 % slower in a VAE decoder (docs/notebook.md#compiled-graphs).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.nn.functional import pad

from haloconv.fusion.convolutions import arguments_of, is_convolution, is_transposed, value_of
from haloconv.fusion.enlarged import INTERPOLATE, NEAREST, image_of, mode_of

Node = torch.fx.Node
Tensor = torch.Tensor

OPTION = "convolve_before_upsampling"
"""The option of torch.compile: True for every such pair, False for none; without it those of ``_is_by_default``."""
LEAST_CHANNELS = 64
"""Fewer, of image or filters, are left: bytes decide there, and those of the rearranged result are as many as saved."""


def asked_by_option(value: object) -> bool | None:
    """What a value of our option asks for; None: what is so by default. Raises ValueError for what is no bool."""
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(f"options={{{OPTION!r}: ...}} is True or False, not {value!r}")


def is_before_upsampling(graph: torch.fx.GraphModule) -> bool:
    """Whether the graph has a convolution that can run before its image is enlarged."""
    return any(_enlarging(node) is not None for node in graph.graph.nodes if is_convolution(node))


def convolve_before_upsampling(
    graph: torch.fx.GraphModule, asked: bool | None = None, written: Collection[str] = ()
) -> int:
    """Replace such pairs in place, where nobody else reads the enlarged image; how many.

    ``asked`` is what the option says. ``written`` are the names of nodes whose results something writes in place.
    Nothing is known of the nodes that come in yet.
    """
    found = 0
    for node in [*graph.graph.nodes] if asked is not False else ():
        enlarging = _enlarging(node) if is_convolution(node) else None
        if enlarging is None or getattr(image_of(enlarging), "name", "") in written:
            continue
        if not (asked or _is_by_default(node)):
            continue
        with graph.graph.inserting_before(node):
            y, result = _shuffled(graph.graph, node, image_of(enlarging))
        y.meta.update({name: value for name, value in node.meta.items() if name != "example_value"})
        node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
        graph.graph.erase_node(enlarging)
        found += 1
    if found:
        graph.recompile()
    return found


def _is_by_default(node: Node) -> bool:
    """Whether it is inference, and filters are in fp32, whose sums are then rounded no more often than they are."""
    w: Tensor = value_of(arguments_of(node)["weight"])
    return w.dtype.itemsize >= torch.float32.itemsize and not value_of(node).requires_grad


def _shuffled(graph: torch.fx.Graph, node: Node, image: Node) -> tuple[Node, Node]:
    """The convolution that stands for the node's, and what has its result."""
    given = arguments_of(node)
    filters = graph.call_function(filters_of_four, (given["weight"],))
    bias = None if given["bias"] is None else graph.call_method("repeat", (given["bias"], 4))
    y = graph.call_function(torch.conv2d, (image, filters, bias, 1, 1))
    return y, graph.call_function(shuffled_and_cut, (y,))


def _enlarging(node: Node) -> Node | None:
    """The node that enlarges the convolution's image, if both are of this kind."""
    given = arguments_of(node)
    image, w = given["input"], value_of(given["weight"])
    if not isinstance(image, Node) or image.target is not INTERPOLATE or set(image.users) != {node}:
        return None
    x, enlarged = value_of(image_of(image)), value_of(image)
    if not all(isinstance(each, Tensor) for each in (x, w, enlarged)):
        return None
    n, c, h, width = x.shape if x.dim() == 4 else (0, 0, 0, 0)
    twofold = mode_of(image) in NEAREST and tuple(enlarged.shape) == (n, c, 2 * h, 2 * width)
    settings = [_pair(given[name]) for name in ("stride", "padding", "dilation")]
    same = given["padding"] == "same" or settings[1] == (1, 1)
    plain = settings[0] == settings[2] == (1, 1) and same and given["groups"] == 1 and not is_transposed(node, given)
    wide = w.dim() == 4 and tuple(w.shape[2:]) == (3, 3) and min(w.shape[:2]) >= LEAST_CHANNELS
    alike = (x.dtype, x.requires_grad) == (enlarged.dtype, enlarged.requires_grad)
    return image if twofold and plain and wide and alike else None


def _pair(value: Any) -> Any:
    return tuple(value) * (3 - len(value)) if isinstance(value, tuple | list) else (value, value)


def filters_of_four(w: Tensor) -> Tensor:
    """(4 K, C, 2, 2) of filters w (K, C, 3, 3): first those for odd rows of the result, of these for odd columns."""
    k, c = w.shape[:2]
    parts = _added(w).view(k, c, 2, 2, 2, 2).flip(3, 5)  # (K, C, row of taps, of the result, column of taps, of it)
    return parts.permute(3, 5, 0, 1, 2, 4).reshape(4 * k, c, 2, 2).to(w.dtype)


def _added(w: Tensor) -> Tensor:
    """(K, C, 4, 4) of filters w (K, C, 3, 3): neighbours added, in rows and columns of the filter between zeros.

    So 0 and 2 are the taps for even places of the result along a dimension, and 1 and 3 for odd ones. Sums are in fp32
    or more: who rounds them rounds once.
    """
    wide = pad(w.to(torch.promote_types(w.dtype, torch.float32)), (1, 1, 1, 1))
    rows = wide[:, :, :-1] + wide[:, :, 1:]
    return rows[..., :-1] + rows[..., 1:]


def shuffled_and_cut(y: Tensor) -> Tensor:
    """(N, K, 2 H, 2 W) in channels_last of the four results y (N, 4 K, H + 1, W + 1), which lie one pixel apart.

    Two pixels of a row of the result are neighbours in y, too, if that is in channels_last.
    """
    n, filters, h, w = y.shape
    parts = y.permute(0, 2, 3, 1).reshape(n, h, w, 2, 2, filters // 4).permute(0, 1, 3, 2, 4, 5)
    cut = parts.reshape(n, 2 * h, 2 * w, filters // 4)[:, 1:-1, 1:-1]
    return cut.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
