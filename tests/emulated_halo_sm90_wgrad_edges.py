"""The runs of halo_sm90/wgrad_edges on the emulator with other pixels of the image outside it: each way x comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.wgrad import wgrad
from haloconv.families.halo_sm90.wgrad.wgrad import Tiling
from haloconv.problem import ZEROS, Request
from tests.cases import case

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_NHWC = "channels_last"
CASES = (
    case("wgrad_edges_rows", "lines that TMA brings one by one, several to a box, and warps of their own fill up",
         (2, 16, 7, 40), (24, 3, 3), padding=1),
    case("wgrad_edges_rows_nhwc", "the same where channels are neighbours; in fp32 by the threads that transpose dy",
         (2, 16, 7, 40), (24, 3, 3), padding=1, storage=_NHWC),
    case("wgrad_edges_few_columns", "rows of dy that are shifted, by threads that fill up lines of x, too",
         (1, 16, 6, 40), (24, 3, 3), padding=(1, 1, 1, 0)),
    case("wgrad_edges_shifted", "rows that begin anywhere, which threads shift", (2, 24, 6, 42), (24, 3, 5),
         padding=(1, 2)),
    case("wgrad_edges_loaded", "pixels that are loaded", (2, 21, 5, 7), (45, 3, 3), padding=1),
    case("wgrad_edges_loaded_nhwc", "the same, of channels that are no groups of 16 bytes", (2, 21, 7, 9), (13, 3, 3),
         padding=1, storage=_NHWC),
    case("wgrad_edges_strips", "several strips of columns, of which the first and the last have an end",
         (1, 24, 5, 296), (32, 3, 3), padding=1),
    case("wgrad_edges_strips_nhwc", "the same where channels are neighbours", (1, 24, 5, 296), (32, 3, 3), padding=1,
         storage=_NHWC),
    case("wgrad_edges_nine_nhwc", "lines of two whole spans and a step, several to a box", (1, 16, 5, 72), (40, 3, 3),
         padding=1, storage=_NHWC),
    case("wgrad_edges_far", "more columns outside than threads load at once", (1, 72, 4, 20), (40, 3, 5),
         padding=(1, 14), dilation=(1, 7)),
    case("wgrad_edges_far_nhwc", "the same where channels are neighbours", (1, 72, 4, 20), (40, 3, 5),
         padding=(1, 14), dilation=(1, 7), storage=_NHWC),
    case("wgrad_edges_large_filter", "several columns of tiles, some of which have no column outside at one end",
         (1, 32, 6, 48), (64, 5, 9), padding=(4, 12), dilation=(2, 3)),
    case("wgrad_edges_stride", "lines a stride apart, three sides padded", (2, 16, 13, 40), (40, 3, 4),
         padding=(2, 0, 1, 3), stride=2),
    case("wgrad_edges_stride_classes", "strides and dilations without a common factor, in rows that are shifted",
         (2, 16, 25, 45), (24, 5, 3), padding=(6, 5, 3, 4), stride=(2, 3), dilation=(3, 2)),
    case("wgrad_edges_groups", "classes of rows of different lengths, padding that differs on every side, groups",
         (2, 48, 13, 48), (32, 3, 3), padding=(5, 4, 7, 5), dilation=(3, 6), groups=2),
    case("wgrad_edges_small", "images of fewer pixels than a line has", (3, 16, 3, 4), (16, 3, 3), padding=1),
    case("wgrad_edges_whole", "as many pixels outside as inside, less one", (2, 16, 5, 9), (16, 3, 3),
         padding=(4, 4, 8, 8), storage=_NHWC),
    case("wgrad_edges_wide", "several blocks of channels, the last of which is not full, and of filters",
         (1, 72, 5, 16), (136, 3, 3), padding=1),
    case("wgrad_edges_wide_nhwc", "the same where channels are neighbours", (1, 72, 5, 16), (136, 3, 3), padding=1,
         storage=_NHWC),
)  # fmt: skip
KERNELS = {"halo_sm90/wgrad_edges"}
SHAPES: dict[str, Callable[[Tiling], bool]] = {
    "wgrad edges": lambda each: True,
    "wgrad edges, columns shared": lambda each: each.tile.split[0] == 3,
    "wgrad edges, channels shared": lambda each: each.tile.split[1] > 1,
    "wgrad edges, single lines": lambda each: each.stage.box_rows == 1,
}
RESULTS = ("circular_wgrad", "reflect_replicate_wgrad", "zeros_circular_wgrad", "replicate_zeros_wgrad")
_SHAPED = (  # case, dtype, result, shape
    ("wgrad_edges_wide", FP32, "circular_wgrad", "wgrad edges, columns shared"),
    ("wgrad_edges_wide_nhwc", FP16, "circular_wgrad", "wgrad edges, columns shared"),
    ("wgrad_edges_wide", FP16, "reflect_replicate_wgrad", "wgrad edges, channels shared"),
    ("wgrad_edges_wide_nhwc", FP32, "circular_wgrad", "wgrad edges, channels shared"),
    ("wgrad_edges_strips_nhwc", BF16, "circular_wgrad", "wgrad edges, single lines"),
)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for index, one in enumerate(CASES):
        for at, dtype in enumerate((FP32, FP16)):
            others = RESULTS[1:] if index < 3 else (RESULTS[1 + (index + at) % 3],)
            yield from ((one.name, dtype, result, "wgrad edges", True) for result in (RESULTS[0], *others))
    yield from ((*run, True) for run in _SHAPED)
    yield "wgrad_edges_rows", FP32, "circular_wgrad", "wgrad edges", False
    yield "wgrad_edges_rows_nhwc", FP16, "reflect_replicate_wgrad", "wgrad edges", False


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, weight gradients with padding modes take the best tiling of that shape."""
    tilings = wgrad.tilings

    def only(request: Request) -> list[Tiling]:
        found = tilings(request)
        return found if request.modes == ZEROS else [each for each in found if SHAPES[shape](each)][:1]

    with MonkeyPatch.context() as patch:
        patch.setattr(wgrad, "tilings", only)
        yield
