"""The runs of halo_sm90/pointwise_planes on the emulator: its own cases, and tiles that only larger layers choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.pointwise import pointwise_planes
from haloconv.families.halo_sm90.pointwise.planes_tile import Tile
from haloconv.problem import Request
from tests.cases import case

CASES = (
    case("sm90_planes", "planes of an odd size, a last tile of fewer images, chunks of channels that are not full",
         (3, 72, 7, 7), (136, 1, 1)),
    case("sm90_planes_even", "planes in which two pixels are a word (in 16 bits), most of a tile's rows",
         (2, 72, 10, 14), (72, 1, 1)),
    case("sm90_planes_deep", "more chunks of channels than stages", (2, 712, 5, 5), (40, 1, 1)),
    case("sm90_planes_many", "several tiles of a block of threads", (9, 40, 5, 9), (136, 1, 1)),
    case("sm90_planes_stride", "every second pixel of x, or zeros between those of the result", (3, 72, 14, 14),
         (72, 1, 1), stride=2),
    case("sm90_planes_uneven", "strides that differ, and rows and columns behind the last pixel that is met",
         (2, 40, 14, 15), (48, 1, 1), stride=(2, 3)),
    case("sm90_planes_large", "planes of no whole rows, so large that stages have few channels", (1, 40, 26, 26),
         (72, 1, 1), stride=2),
    case("sm90_planes_rows", "boxes of every second row of x that are wider than the rows (in 16 bits)",
         (2, 72, 28, 28), (72, 1, 1), stride=2),
    case("sm90_planes_bands", "bands of rows, the last of fewer rows", (2, 72, 33, 48), (40, 1, 1), stride=2),
    case("sm90_planes_bands_uneven", "bands of rows of which a stride leaves out columns alone", (2, 24, 24, 56),
         (40, 1, 1), stride=(1, 3)),
    case("sm90_planes_packed", "filters that are no multiple of 16 bytes apart (in 16 bits)", (2, 36, 6, 14),
         (20, 1, 1)),
)  # fmt: skip

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_EVERY, _BOTH, _DENSE = (FP32, FP16, BF16), (FP32, FP16), ("fprop", "dgrad")

SHAPES: dict[str, Callable[[Tile], bool]] = {
    "planes": lambda tile: True,
    "planes, x in boxes": lambda tile: tile.x_cols > 0,
    "planes, rows shared": lambda tile: not tile.split_n and tile.m_blocks == 1,
    "planes, two blocks": lambda tile: not tile.split_n and tile.m_blocks == 2,
    "planes, columns shared": lambda tile: tile.split_n,
    "planes, two blocks, columns shared": lambda tile: tile.split_n and tile.m_blocks == 2,
    "planes, 256 columns": lambda tile: tile.n == 256,
}
_SMALL = ("sm90_planes", "sm90_planes_many", "sm90_planes_stride")
# shape, cases, dtypes, results
_RUNS: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...], tuple[str, ...]], ...] = (
    ("planes", ("sm90_planes",), _EVERY, (*_DENSE, "relu", "scale_relu")),
    ("planes", ("sm90_planes_even",), (FP16, BF16), (*_DENSE, "relu", "scale_relu")),
    ("planes", ("sm90_planes",), (FP32,), ("residual_relu",)),
    ("planes", ("sm90_planes_even",), (FP16,), ("scale_residual",)),
    ("planes", ("sm90_planes_deep", "sm90_planes_many"), _BOTH, _DENSE),
    ("planes", ("sm90_planes_stride", "sm90_planes_uneven", "sm90_planes_large"), _BOTH, _DENSE),
    ("planes, x in boxes", ("sm90_planes_rows",), _BOTH, ("fprop",)),
    ("planes", ("sm90_planes_rows", "sm90_planes_bands", "sm90_planes_bands_uneven"), _BOTH, _DENSE),
    ("planes", ("sm90_planes_bands",), (BF16,), ("relu", "residual_relu")),
    ("planes", ("sm90_planes_packed",), (FP16,), _DENSE),
    ("planes, rows shared", _SMALL, _BOTH, _DENSE),
    ("planes, two blocks", _SMALL, _BOTH, _DENSE),
    ("planes, two blocks", ("sm90_planes_even",), (FP16,), _DENSE),
    ("planes, columns shared", (*_SMALL, "sm90_planes_bands"), _BOTH, _DENSE),
    ("planes, two blocks, columns shared", ("sm90_planes",), _BOTH, _DENSE),
    ("planes, 256 columns", ("sm90_planes",), _BOTH, ("fprop",)),
)  # fmt: skip
SANITIZED = (  # case, results, shape: what compute-sanitizer is to see
    ("sm90_planes", _DENSE, "planes, columns shared"),
    ("sm90_planes_even", (*_DENSE, "scale_relu", "residual_relu"), "planes"),
    ("sm90_planes_deep", _DENSE, "planes"),
    ("sm90_planes_many", _DENSE, "planes, rows shared"),
    ("sm90_planes_stride", _DENSE, "planes, two blocks"),
    ("sm90_planes_large", _DENSE, "planes"),
    ("sm90_planes_rows", _DENSE, "planes"),
    ("sm90_planes_rows", ("fprop",), "planes, x in boxes"),
    ("sm90_planes_bands", _DENSE, "planes"),
    ("sm90_planes_packed", _DENSE, "planes"),
)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for shape, names, dtypes, results in _RUNS:
        for name in names:
            yield from ((name, dtype, result, shape, True) for dtype in dtypes for result in results)
    for name in ("sm90_planes", "sm90_planes_stride", "sm90_planes_bands"):
        yield from ((name, dtype, result, "planes", False) for dtype in _BOTH for result in _DENSE)


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, the kernel takes the smallest tile of that shape, whatever its cost model prefers."""
    all_tiles = pointwise_planes.all_tiles

    def only(request: Request) -> tuple[Tile, ...]:
        found = (tile for tile in all_tiles(request) if SHAPES[shape](tile))
        return tuple(sorted(found, key=lambda tile: (tile.split_n, tile.m_blocks, tile.filters)))[:1]

    with MonkeyPatch.context() as patch:
        patch.setattr(pointwise_planes, "all_tiles", only)
        yield
