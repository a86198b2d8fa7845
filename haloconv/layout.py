"""How 4-D tensors lie in memory: the one place that knows ``"nchw"`` from ``"nhwc"``."""

from __future__ import annotations

from typing import Literal

Layout = Literal["nchw", "nhwc"]
"""Memory order of a 4-D tensor: contiguous, or channels_last."""


def strides_of(shape: tuple[int, ...], layout: Layout) -> tuple[int, int, int, int]:
    """Strides in elements of a dense 4-D tensor stored as ``"nchw"`` or ``"nhwc"``."""
    _, c, h, w = shape
    if layout == "nhwc":
        return (c * h * w, 1, w * c, c)
    return (c * h * w, h * w, w, 1)


def neighbours_of(strides: tuple[int, ...]) -> Layout:
    """``"nhwc"`` if neighbours in memory are channels, else ``"nchw"``: of a 4-D tensor, dense or not."""
    return "nhwc" if strides[1] == 1 and strides[3] != 1 else "nchw"


def is_channels_last(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a 4-D tensor counts as channels_last, by the rule that PyTorch derives output layouts from.

    The rule of ``is_channels_last_strides_2d`` in c10/core/MemoryFormat.h: strides grow in the order C, W, H, N, and
    forms that are both contiguous and channels_last count as contiguous.
    """
    if strides[1] == 0:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True
