"""Padding modes on CPU tensors: PyTorch's results of a padded copy, and layers that are cut as for kernels of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from haloconv import padding
from haloconv.choose.choice import Choice

Tensor = torch.Tensor


def integers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def padded(x: Tensor, layer: torch.nn.Conv2d) -> Tensor:
    """The copy, one dimension after the other."""
    modes = layer.padding_mode if isinstance(layer.padding_mode, tuple) else (layer.padding_mode,) * 2
    left, right, top, bottom = layer._reversed_padding_repeated_twice
    for mode, sides in zip(modes, ((0, 0, top, bottom), (left, right, 0, 0)), strict=True):
        if any(sides):
            x = torch.nn.functional.pad(x, sides, "constant" if mode == "zeros" else mode)
    return x


def convolved(x: Tensor, layer: torch.nn.Conv2d) -> Tensor:
    """What a layer of PyTorch's that had the padding would give."""
    return torch.conv2d(padded(x, layer), layer.weight, layer.bias, layer.stride, 0, layer.dilation, layer.groups)


def with_integers(layer: Any) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(*parameter.shape))
    return layer


@contextmanager
def cut_on_a_cpu() -> Iterator[None]:
    """Layers are cut for a family of ours on CPU tensors, too; PyTorch convolves interior and rims."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding, "choose", lambda problem, device, family: Choice("direct", "a test"))
        patch.setattr(padding, "_FEWEST_BYTES", {"nchw": 0, "nhwc": 0})
        patch.setattr(padding, "_job_of_form", padding._job_of_form.__wrapped__)
        yield
