"""The runs of halo_sm90/conv_edges on the emulator with other pixels of the image outside it: every way into a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.conv import conv_edges
from haloconv.families.halo_sm90.conv.configs import cost, tilings
from haloconv.families.halo_sm90.conv.form import Form
from haloconv.families.halo_sm90.conv.shape import Storage, TileShape
from haloconv.families.halo_sm90.conv.tile import Tiling
from tests.cases import case
from tests.oracle import EDGES

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = (
    case("edges_aligned", "rows in boxes, which a warp fills up at both ends; the last chunk is not full",
         (2, 42, 7, 136), (40, 3, 5), padding=(1, 2)),
    case("edges_joined", "rows end to end, whose neighbours in memory are overwritten", (1, 40, 6, 66), (72, 5, 3),
         padding=(2, 1)),
    case("edges_by_four", "rows that every fourth plane aligns are loaded", (1, 64, 5, 67), (40, 3, 3), padding=1),
    case("edges_nhwc", "channels are neighbours: a warp fills up boxes, of which one is not full",
         (2, 40, 6, 72), (72, 3, 5), padding=(1, 2), storage="channels_last"),
    case("edges_packed", "few filters of a gradient, whose outputs are packed; an odd number of rows and of columns",
         (1, 24, 7, 40), (40, 3, 4), padding=(1, 1, 1, 2), dilation=(1, 1)),
    case("edges_packed_nhwc", "the same, of boxes and of loads", (1, 32, 5, 33), (40, 3, 3), padding=1,
         storage="channels_last"),
    case("edges_apart", "pixels of channels that no box takes are loaded from where they stand", (1, 38, 5, 20),
         (24, 3, 3), padding=1, storage="channels_last"),
    case("edges_copied", "the same of a strided row, in whole pieces", (1, 40, 5, 20), (24, 3, 3), padding=(1, 2),
         stride=(1, 2), storage="channels_last"),
    case("edges_boxed", "boxes of a strip whose columns outside have more pieces than a warp has lanes",
         (1, 64, 3, 136), (40, 3, 7), padding=(1, 15), dilation=(1, 5), storage="channels_last"),
    case("edges_strided", "planes of a strided row, three sides padded", (2, 24, 9, 70), (40, 3, 4),
         padding=(2, 0, 1, 3), stride=(2, 2)),
    case("edges_dilated", "groups, and residue classes of dilated rows", (1, 48, 11, 40), (64, 3, 3), padding=(2, 3),
         dilation=(2, 3), groups=2),
    case("edges_few_rows", "a strided filter of one row, whose lines a consumer passes over", (2, 80, 6, 136),
         (16, 1, 3), stride=(2, 2), padding=(1, 3, 2, 2), groups=2),
    case("edges_far", "more columns outside than a warp loads at once", (1, 40, 3, 72), (40, 1, 7), padding=(0, 15),
         dilation=(1, 5)),
    case("edges_narrow", "a unit with columns outside at both ends", (1, 40, 4, 12), (40, 1, 7), padding=(0, 9),
         dilation=(1, 3)),
)  # fmt: skip
KERNELS = {"halo_sm90/conv_edges"}
SHAPES: dict[str, Callable[[TileShape], bool]] = {
    "edges": lambda shape: True,
    "edges in passing": lambda shape: not shape.keeps,
    "edges kept": lambda shape: shape.keeps,
    "edges of 128": lambda shape: shape.run == 128 and shape.runs == 1,
    "edges of 128 in passing": lambda shape: shape.run == 128 and shape.runs == 1 and not shape.keeps,
    "edges of wide tiles": lambda shape: shape.sum_registers > 64,
    "edges shared": lambda shape: shape.shared_tile,
    "edges packed": lambda shape: shape.packs > 1,
    "edges packed in rows": lambda shape: shape.pack_h > 1 and shape.boxes,
    "edges boxed": lambda shape: shape.boxes,
    "edges boxed in passing": lambda shape: shape.boxes and not shape.keeps,
}
_RUNS = (  # case, dtype, result, shape
    ("edges_aligned", FP32, "circular", "edges"),
    ("edges_aligned", FP16, "circular", "edges"),
    ("edges_aligned", FP32, "reflect_replicate", "edges"),
    ("edges_aligned", FP16, "zeros_circular", "edges in passing"),
    ("edges_aligned", BF16, "circular_dgrad", "edges kept"),
    ("edges_joined", FP32, "zeros_circular", "edges shared"),
    ("edges_joined", FP16, "circular", "edges"),
    ("edges_joined", FP32, "zeros_circular_dgrad", "edges of 128"),
    ("edges_by_four", FP16, "replicate_zeros", "edges"),
    ("edges_copied", FP16, "reflect_replicate", "edges in passing"),
    ("edges_copied", FP32, "circular", "edges"),
    ("edges_nhwc", FP32, "circular", "edges boxed"),
    ("edges_nhwc", FP32, "zeros_circular", "edges boxed"),
    ("edges_nhwc", FP16, "reflect_replicate", "edges boxed"),
    ("edges_nhwc", FP16, "circular", "edges boxed in passing"),
    ("edges_nhwc", BF16, "circular_dgrad", "edges boxed"),
    ("edges_nhwc", FP16, "replicate_zeros", "edges boxed"),
    ("edges_nhwc", FP32, "halo_circular", "edges boxed in passing"),
    ("edges_nhwc", FP16, "halo_zeros", "edges boxed"),
    ("edges_boxed", FP32, "circular", "edges boxed"),
    ("edges_boxed", BF16, "halo_circular", "edges boxed"),
    ("edges_apart", FP32, "circular", "edges"),
    ("edges_packed", FP32, "circular_dgrad", "edges packed in rows"),
    ("edges_packed", FP16, "zeros_circular_dgrad", "edges packed"),
    ("edges_packed_nhwc", FP32, "circular_dgrad", "edges packed in rows"),
    ("edges_packed_nhwc", FP16, "circular_dgrad", "edges packed"),
    ("edges_aligned", FP16, "halo_zeros", "edges"),
    ("edges_aligned", FP32, "halo_circular", "edges"),
    ("edges_aligned", FP32, "halo_zeros", "edges in passing"),
    ("edges_aligned", FP16, "halo_circular", "edges kept"),
    ("edges_dilated", FP32, "halo_circular", "edges"),
    ("edges_strided", FP16, "circular", "edges"),
    ("edges_strided", FP32, "reflect_replicate", "edges"),
    ("edges_dilated", FP16, "circular_dgrad", "edges"),
    ("edges_dilated", FP32, "reflect_replicate", "edges"),
    ("edges_few_rows", FP16, "circular", "edges of 128 in passing"),
    ("edges_far", FP32, "circular", "edges of wide tiles"),
    ("edges_narrow", FP32, "reflect_replicate", "edges"),
    ("edges_narrow", FP32, "circular", "edges"),
    ("edges_narrow", FP16, "circular", "edges"),
    ("edges_far", FP16, "zeros_circular", "edges of wide tiles"),
)
SAME = (
    "edges_packed", "edges_packed_nhwc",
    "edges_aligned", "edges_joined", "edges_by_four", "edges_nhwc", "edges_apart", "edges_boxed", "edges_dilated",
    "edges_far", "edges_narrow",
)  # fmt: skip
"""Cases whose output is as large as the image: their gradient is such a convolution itself."""
HALOS = ("edges_aligned", "edges_nhwc", "edges_boxed", "edges_dilated")
"""Cases whose rows TMA brings, and that have padded ones."""


def results_of(name: str) -> tuple[str, ...]:
    """What conv_edges has of the case of this name, of tests.oracle.EDGES."""
    return tuple(
        result
        for result, (direction, (rows, _)) in EDGES.items()
        if (direction == "fprop" or (direction == "dgrad" and name in SAME)) and (rows != "halo" or name in HALOS)
    )


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    yield from ((*run, True) for run in _RUNS)
    yield "edges_aligned", FP16, "circular", "edges", False
    yield "edges_packed", FP32, "circular_dgrad", "edges packed in rows", False
    yield "edges_apart", FP16, "reflect_replicate", "edges packed", False


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, the kernel takes the best of its tiles of that shape."""

    def only(form: Form, storage: Storage, sm_count: int, may_split: bool = True) -> tuple[Tiling, ...]:
        fitting = [each for each in tilings(form, storage) if SHAPES[shape](each.shape)]
        return tuple(sorted(fitting, key=lambda each: cost(each, each.storage, sm_count)))

    with MonkeyPatch.context() as patch:
        patch.setattr(conv_edges, "best_tilings", only)
        yield
