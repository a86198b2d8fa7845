"""PyTorch at its best: what cuDNN's search finds differs from process to process, so it searches twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_APART_BYTES = 16  # from the alignment of allocations to the least that every kernel of cuDNN takes


def searched_again(
    run: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor | None]
) -> Callable[[], torch.Tensor]:
    """``run`` of the same operands elsewhere: PyTorch's cache of cuDNN's searches asks for their alignment, too.

    They are copied at the first call, and where memory is short for that, they are those that PyTorch has had.
    """
    copies: list[torch.Tensor | None] = []

    def call() -> torch.Tensor:
        if not copies:
            try:
                copies.extend([each if each is None else apart(each) for each in operands])
            except torch.cuda.OutOfMemoryError:
                copies[:] = operands
        return run(*copies)

    return call


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, that begins at an odd multiple of 16 bytes; of an expanded tensor itself."""
    if not tensor.numel() or 0 in tensor.stride():
        return tensor
    offset = _APART_BYTES // tensor.element_size()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.new_empty(offset + extent)
    return storage.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)
