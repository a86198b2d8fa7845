"""The runs of halo_sm90/conv whose output has planes that are no multiple of 16 bytes, in tiles that leave in boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.conv.configs import cost, tilings
from haloconv.families.halo_sm90.conv.form import Form
from haloconv.families.halo_sm90.conv.shape import Storage
from haloconv.families.halo_sm90.conv.tile import Tiling
from tests.cases import case

CASES = (
    case("filters_by_two", "every second plane of the output is aligned in fp32, every fourth in 16 bits; strips, and "
         "blocks of filters that are not full", (2, 8, 7, 148), (200, 3, 3)),
    case("filters_by_four", "every fourth plane in fp32, one tap in a row", (2, 16, 7, 133), (400, 3, 1)),
    case("filters_by_eight", "every eighth plane in 16 bits, every fourth in fp32; rows begin at every place",
         (3, 8, 3, 133), (456, 1, 3)),
    case("filters_half", "every second plane in 16 bits, a block for each", (2, 24, 8, 150), (72, 3, 3),
         padding=(0, 1)),
    case("filters_gradient", "the same of the gradient of the input", (2, 200, 5, 66), (40, 3, 3), padding=1),
    case("filters_dilated", "residue classes of rows", (1, 8, 11, 152), (200, 3, 3), dilation=(2, 3)),
    case("filters_cut", "8 columns (fp32: 4) behind a strip of 128 are left to a launch of their own; every second "
         "plane in 16 bits, every one in fp32", (2, 72, 6, 130), (72, 3, 3), padding=1),
)  # fmt: skip

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_EVERY, _BOTH = (FP32, FP16, BF16), (FP32, FP16)

SHAPES: dict[str, Callable[[Tiling], bool]] = {
    "every few filters": lambda tiling: True,
    "every few filters, two tiles": lambda tiling: not tiling.shape.shared_tile,
    "every few filters, a shared tile": lambda tiling: tiling.shape.shared_tile,
    "every few filters, two runs": lambda tiling: tiling.shape.runs == 2,
    "every few filters, runs of 256": lambda tiling: tiling.shape.run == 256,
    "rows cut": lambda tiling: tiling.rest is not None,
    "every few filters, one buffer": lambda tiling: tiling.memory.y_buffers == 1 and not tiling.shape.shared_tile,
}
# shape, cases, dtypes, results
_RUNS: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...], tuple[str, ...]], ...] = (
    ("every few filters", ("filters_by_two", "filters_by_eight"), _EVERY, ("fprop",)),
    ("every few filters", ("filters_by_four",), (FP32,), ("fprop",)),
    ("every few filters", ("filters_by_two",), _BOTH, ("relu", "scale_relu", "scale_residual")),
    ("every few filters", ("filters_half",), (FP16, BF16), ("fprop",)),
    ("every few filters", ("filters_gradient",), _BOTH, ("dgrad",)),
    ("every few filters", ("filters_dilated",), _BOTH, ("fprop",)),
    ("every few filters, two tiles", ("filters_by_two", "filters_by_eight"), _BOTH, ("fprop",)),
    ("every few filters, a shared tile", ("filters_by_two", "filters_by_eight"), _BOTH, ("fprop",)),
    ("every few filters, two runs", ("filters_by_two", "filters_by_eight"), _BOTH, ("fprop",)),
    ("every few filters, runs of 256", ("filters_by_two", "filters_by_eight"), _BOTH, ("fprop",)),
    ("every few filters, one buffer", ("filters_gradient",), (FP32,), ("dgrad",)),
    ("rows cut", ("filters_cut",), _BOTH, ("fprop", "dgrad", "scale_residual")),
    ("rows cut", ("filters_cut",), (BF16,), ("fprop",)),
)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for shape, names, dtypes, results in _RUNS:
        yield from ((name, dtype, one, shape, True) for name in names for dtype in dtypes for one in results)


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, halo_sm90/conv takes the best of its tilings of that shape, whatever its cost model prefers.

    Problems alone, whose strides are not known, have those that they always have.
    """
    best_tilings = conv.best_tilings

    def only(form: Form, storage: Storage, sm_count: int, may_split: bool = True) -> tuple[Tiling, ...]:
        if not storage.y_joined:
            return best_tilings(form, storage, sm_count, may_split)
        found = (each for each in tilings(form, storage) if each.rest or each.y_planes > 1)
        found = (each for each in found if (each.rest is None) == (shape != "rows cut"))
        return tuple(sorted(filter(SHAPES[shape], found), key=lambda each: cost(each, each.storage, sm_count)))

    with MonkeyPatch.context() as patch:
        patch.setattr(conv, "best_tilings", only)
        yield
