"""PyTorch at its best: what cuDNN's search finds differs from process to process, so it searches twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_APART_BYTES = 16  # from the alignment of allocations to the least that every kernel of cuDNN takes


def searched_again(
    run: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor | None]
) -> Callable[[], torch.Tensor]:
    """``run`` of the operands elsewhere; they are copied at the first call."""
    copies: list[torch.Tensor | None] = []

    def call() -> torch.Tensor:
        if not copies:
            copies.extend(all_apart(operands))
        return run(*copies)

    return call


def all_apart(operands: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """The operands elsewhere, for which PyTorch searches anew: its cache of searches asks for their alignment, too.

    Where memory is short for copies, they are those that PyTorch has had.
    """
    try:
        return tuple(each if each is None else apart(each) for each in operands)
    except torch.cuda.OutOfMemoryError:
        return tuple(operands)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, that begins at an odd multiple of 16 bytes; of an expanded tensor itself."""
    if not tensor.numel() or 0 in tensor.stride():
        return tensor
    offset = _APART_BYTES // tensor.element_size()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.new_empty(offset + extent)
    return storage.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)
