"""The contract between the planner and a family: what it takes, and how it is bound to tensors of one form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from haloconv.problem import Conv2dProblem

BoundCall = Callable[..., torch.Tensor]
"""What binding gives: ``fprop(x, w, b) -> y``, ``dgrad(dy, w) -> dx`` or ``wgrad(dy, x) -> dw``."""


class TensorForm(NamedTuple):
    """What a plan may rely on about a tensor: strides in elements, and whether it starts at a multiple of 16 bytes."""

    strides: tuple[int, ...]
    aligned: bool


class Family(Protocol):
    """One algorithm for some problems."""

    name: str

    def why_not(self, problem: Conv2dProblem, device: torch.device) -> str | None:
        """None if the family takes the problem on the device, else a sentence that says why not."""

    def bind(
        self, problem: Conv2dProblem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> BoundCall:
        """Everything that does not depend on the elements: compile, load, fix the launch.

        ``first`` and ``second`` are the forms of (x, w) in fprop, (dy, w) in dgrad, (dy, x) in wgrad. ``result_layout``
        is the memory order of the result, ``"nchw"`` or ``"nhwc"``.
        """


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def strides_of(shape: tuple[int, int, int, int], layout: str) -> tuple[int, int, int, int]:
    """Strides in elements of a dense 4-D tensor stored as ``"nchw"`` or ``"nhwc"``."""
    _, c, h, w = shape
    if layout == "nhwc":
        return (c * h * w, 1, w * c, c)
    return (c * h * w, h * w, w, 1)


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
