"""The functions and layers beside conv2d, with PyTorch's of the same name, and small calls of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import haloconv


class Front(NamedTuple):
    """One function and its layer, ours and PyTorch's; ``image`` extents for inputs of the calls below."""

    ours: Callable[..., torch.Tensor]
    theirs: Callable[..., torch.Tensor]
    layer: type[torch.nn.Module]
    torchs: type[torch.nn.Module]
    image: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.theirs.__name__

    @property
    def transposed(self) -> bool:
        return "transpose" in self.name


FRONTS = (
    Front(haloconv.conv1d, torch.nn.functional.conv1d, haloconv.Conv1d, torch.nn.Conv1d, (9,)),
    Front(haloconv.conv3d, torch.nn.functional.conv3d, haloconv.Conv3d, torch.nn.Conv3d, (4, 5, 6)),
    Front(
        haloconv.conv_transpose1d,
        torch.nn.functional.conv_transpose1d,
        haloconv.ConvTranspose1d,
        torch.nn.ConvTranspose1d,
        (7,),
    ),
    Front(
        haloconv.conv_transpose2d,
        torch.nn.functional.conv_transpose2d,
        haloconv.ConvTranspose2d,
        torch.nn.ConvTranspose2d,
        (5, 6),
    ),
)

CALLS: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("conv1d", (3,), {}),
    ("conv1d", (7,), {"padding": 9, "dilation": 3}),
    ("conv1d", (4,), {"padding": "same", "dilation": 2, "groups": 2}),
    ("conv1d", (5,), {"padding": (2,), "stride": 2}),
    ("conv1d", (1,), {"padding": "valid", "stride": [3]}),
    ("conv3d", (4, 5, 6), {"stride": (4, 5, 6)}),
    ("conv3d", (2, 2, 2), {"stride": 2}),
    ("conv3d", (3, 1, 1), {"padding": (1, 0, 0), "stride": (2, 1, 1), "groups": 2}),
    ("conv3d", (1, 3, 2), {"padding": "same"}),
    ("conv_transpose1d", (16,), {"stride": 8, "padding": 4}),
    ("conv_transpose1d", (4,), {"stride": (2,), "padding": 1, "output_padding": 1}),
    ("conv_transpose1d", (3,), {"dilation": 2, "groups": 2}),
    ("conv_transpose2d", (3, 3), {}),
    ("conv_transpose2d", (2, 2), {"stride": 2}),
    ("conv_transpose2d", (4, 4), {"stride": 2, "padding": 1}),
    ("conv_transpose2d", (3, 2), {"stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0)}),
    ("conv_transpose2d", (3, 5), {"dilation": (2, 1), "groups": 2, "padding": 2}),
    ("conv_transpose2d", (1, 1), {"stride": 3, "output_padding": 2}),
    ("conv_transpose2d", (3, 3), {"dilation": 3, "output_padding": 1, "padding": 3}),
)
"""A function, the taps of its filter, and arguments; the last is none of ours."""
POSED = CALLS[:-1]
OF_NO_KERNEL = [call for call in CALLS if call[0] == "conv3d" and call[1] != (3, 1, 1)]
"""Products, and frames that do not lie in memory one after another."""


def front(name: str) -> Front:
    return next(each for each in FRONTS if each.name == name)


def call_id(value: object) -> str:
    return str(value).replace(" ", "")


def operands(
    call: tuple, dtype: torch.dtype = torch.float64, *, batch: int = 2, bias: bool = True, channels: int = 4
) -> list[torch.Tensor]:
    """x, w and b of a call, the same at each: normal values, or small integers of an integer dtype."""
    name, taps, options = call
    one, groups, filters = front(name), options.get("groups", 1), 6
    gen = torch.Generator().manual_seed(2)
    w_shape = (channels, filters // groups) if one.transposed else (filters, channels // groups)
    shapes = [(batch, channels, *one.image), (*w_shape, *taps), *([(filters,)] if bias else [])]
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]
