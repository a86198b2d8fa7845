"""Faults in how halo_sm90's kernels, and the sum behind split-K, add a residual."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutations.mutation import Mutation

_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32
_SUMS = "reduce/partials"


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, kernel: str = "halo_sm90/conv",
    result: str = "residual_relu", dtype: torch.dtype = _FP16, shape: str = "", finite: bool = True,
) -> Mutation:  # fmt: skip
    return Mutation(f"residual: {name}", kernel, fault, edits, on, result, dtype, "halo_sm90", shape, finite)


_TWO_RUNS: dict[str, Any] = {"on": "large_3x3", "shape": "two runs of 64"}
_POINTWISE: dict[str, Any] = {"kernel": "halo_sm90/pointwise", "shape": "pointwise"}
_PLANES: dict[str, Any] = {"kernel": "halo_sm90/pointwise_planes", "shape": "planes"}

MUTATIONS = (
    _fault("none", "bias alone is added to sums",
           ("(sum, both[i / 2 % 2]) + values[i];", "(sum, both[i / 2 % 2]);"), **_TWO_RUNS),
    _fault("of the pixel before", "every other pixel gets its neighbour's",
           ("at_px = first + i / 2 * 8 + i % 2;", "at_px = first + i / 2 * 8;"), **_TWO_RUNS),
    _fault("of other rows", "fp32 rows by pixels are taken as in order",
           ("row = SPREAD ? hc::spread_row(lane / 4) : lane / 4;", "row = lane / 4;"), on="large_3x3", dtype=_FP32),
    _fault("of filters beyond the last one", "it is read behind the last filter",
           ("inside && row + 8 * half < own.count ? hc::to_acc", "inside ? hc::to_acc"), on="shared_nhwc", dtype=_FP32,
           shape="shared tile flat"),
    _fault("of places outside", "it is read where no output is", ("inside && row + 8 * half", "row + 8 * half"),
           on="large_3x3", dtype=_FP32),
    _fault("of rows end to end", "rows that begin before their strip get that of the strip",
           ("px % RUN - shift + lane % 4 * 2;", "px % RUN + lane % 4 * 2;"), on="joined_by_two", dtype=_FP32,
           result="scale_residual", shape="boxes in rows"),
    _fault("the fix-up forgets it", "an output is summed anew without it",
           ("hc::to_acc(p.residual[place])", "0.f"), on="large_3x3", dtype=_FP32, finite=False,
           kernel="halo_sm90/fixup"),
    _fault("split-K without it", "it is added by nobody", ("sum += hc::to_acc(p.residual[place.offset]);", ""),
           on="split_few", dtype=_FP32, shape="split-K of two", kernel=_SUMS),
    _fault("of the tile's first slab", "all slabs of a tile get that of one",
           ("n + slab % SLABS * SLAB,", "n,"), on="sm90_pointwise", dtype=_FP32, **_POINTWISE),
    _fault("of places behind a box", "it is added to places that were never written",
           ("RESIDUAL && i < CONSUMERS * Y_BUFFERS * rest", "false && i < 0"), on="sm90_pointwise_stride",
           result="scale_residual", **_POINTWISE),
    _fault("of the first tile", "all tiles of a block of threads get that of one",
           ("slab = 0, tile += gridDim.x;", "slab = 0;"), on="sm90_pointwise", dtype=_FP32, **_POINTWISE),
    _fault("before it is there", "a slab is added to before TMA has brought it",
           ("self.residual.wait_for_slab();", ""), on="sm90_pointwise", **_POINTWISE),
    _fault("of the lower half", "both outputs of a word get that of the first",
           ("Half{(unsigned short)(word >> 16)}", "Half{(unsigned short)word}"), on="sm90_pointwise", **_POINTWISE),
    _fault("into a buffer that is read", "TMA brings it before a slab has left",
           ("wait_group_read<Y_BUFFERS - 1 - AHEAD>", "wait_group_read<Y_BUFFERS>"), on="sm90_pointwise", dtype=_FP32,
           **_POINTWISE),
    _fault("of the first band", "all bands of an image get that of the first one",
           ("pixel = tile.band * p.pixels + ", "pixel = "), on="sm90_planes_bands", dtype=_BF16, **_PLANES),
    _fault("of the first image", "all images of a tile get that of the first one",
           ("const int image = tile.image + in_tile;\n            const bool there",
            "const int image = tile.image;\n            const bool there"), on="sm90_planes", dtype=_FP32, **_PLANES),
)  # fmt: skip
