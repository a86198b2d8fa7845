"""The sum over partial filter gradients for callers that name its shape: going away."""

from __future__ import annotations

from collections.abc import Callable

import torch

from haloconv.families.reduce import partials
from haloconv.families.reduce.partials import Axis, Partials

Four = tuple[int, int, int, int]


def bind_sum(
    dtype: torch.dtype, shape: Four, strides: Four, parts: int, device: torch.device
) -> Callable[[int, int], None]:
    """``run(out_pointer, partials_pointer)``: out[i] = sum over parts, in order, of partials[part][i]."""
    axes = tuple(Axis(*each) for each in zip(shape, strides, strict=True))
    run = partials.bind_sum(Partials(dtype, axes, parts), device)
    return lambda out, sums: run(out, sums, 0)
