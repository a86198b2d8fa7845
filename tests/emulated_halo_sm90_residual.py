"""The runs of halo_sm90/conv with a residual on the emulator: every way out of a tile, on cases that others have."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CASES = ()
SHAPES: dict[str, object] = {}  # those of tests.emulated_halo_sm90
FP32, FP16 = torch.float32, torch.float16
_RUNS = (  # case, dtype, result, shape: sums leave by pixels and by filters, in boxes and by lanes, packed and not
    ("border_3x3", FP16, "scale_residual", ""),
    ("large_3x3", FP32, "residual_relu", ""),
    ("large_3x3", FP16, "residual_relu", "two runs of 64"),
    ("unaligned", FP16, "residual_relu", ""),
    ("channels_last_odd", FP16, "scale_residual", ""),
    ("aligned_3x5", FP16, "residual_relu", "boxes in rows"),
    ("aligned_nhwc", FP16, "residual_relu", "boxes in rows"),
    ("joined_by_two", FP32, "scale_residual", "boxes in rows"),
    ("shared_nhwc", FP32, "residual_relu", "shared tile flat"),
    ("split_few", FP32, "residual_relu", "split-K of two"),
    ("split_few_nhwc", FP16, "residual_relu", "split-K of two"),
)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    yield from ((*run, True) for run in _RUNS)
    yield "large_3x3", FP32, "residual_relu", "", False
