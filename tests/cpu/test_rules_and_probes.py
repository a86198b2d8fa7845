"""Rules by draws, probes and records: each beside a layer on which it holds, one on which it does not."""

from __future__ import annotations

import pytest
import torch

from haloconv.choose.rules import by_rule
from haloconv.problem import Direction, Problem
from tests.cpu.test_rules import H200, TF32, on_gpu
from tools.measured import stood_in

FP32, FP16, BF16 = {"dtype": torch.float32}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}
AROUND = {"padding": (1,) * 4}


@pytest.mark.parametrize(
    ("direction", "behind", "ahead", "options", "family"),
    [
        ("dgrad", (2, 16, 22, 22, 1392, 7, 7), (2, 504, 85, 170, 24, 7, 7), {**FP32, "dilation": (4, 4)}, "direct"),
        ("fprop", (64, 24, 8, 8, 512, 7, 7), (128, 80, 25, 28, 16, 7, 7), {**FP32, "padding": (3,) * 4}, "direct"),
        ("fprop", (8, 3, 256, 256, 32, 11, 11), (20, 8, 224, 448, 64, 7, 7), {**FP32, "stride": (4, 4)}, "direct"),
        ("wgrad", (2, 16, 144, 288, 24, 7, 7), (8, 32, 512, 512, 64, 7, 7),
         {**FP32, "padding": (12,) * 4, "dilation": (4, 4)}, "direct"),
        ("wgrad", (32, 64, 56, 112, 64, 1, 1), (16, 64, 64, 128, 64, 3, 3), {**FP32, "groups": 8}, "direct"),
        ("wgrad", (10, 128, 112, 115, 128, 3, 3), (2, 256, 64, 128, 256, 3, 3), {**FP32, "groups": 32}, "direct"),
        ("dgrad", (64, 728, 14, 14, 728, 3, 3), (8, 728, 48, 48, 728, 3, 3),
         {**FP32, **AROUND, "groups": 728, "layout": "nhwc"}, "depthwise"),
        ("fprop", (64, 512, 14, 13, 512, 1, 1), (64, 512, 14, 13, 512, 3, 3),
         {**FP16, "groups": 64, "dilation": (2, 2), "layout": "nhwc"}, "halo_sm80"),
        ("dgrad", (64, 32, 28, 31, 32, 3, 3), (64, 32, 64, 64, 32, 3, 3),
         {**TF32, **AROUND, "groups": 2, "layout": "nhwc"}, "grouped_sm90"),
        ("wgrad", (1, 512, 129, 129, 512, 3, 3), (2, 512, 128, 128, 512, 3, 3),
         {**TF32, "stride": (2, 2)}, "halo_sm90"),
        ("wgrad", (1, 328, 119, 238, 328, 3, 3), (1, 320, 119, 240, 320, 3, 3), {**FP16, **AROUND}, "halo_sm90"),
        ("wgrad", (41, 664, 13, 26, 408, 3, 3), (32, 512, 16, 16, 512, 3, 3), {**BF16, **AROUND}, "halo_sm90"),
        ("wgrad", (64, 1024, 14, 14, 1024, 3, 3), (64, 1024, 28, 28, 1024, 3, 3),
         {**FP16, **AROUND, "groups": 16, "layout": "nhwc"}, "halo_sm90"),
    ],
)  # fmt: skip
def test_what_draws_and_probes_were_behind_on(
    direction: Direction, behind: tuple, ahead: tuple, options: dict, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By draws and probes of an NVIDIA H200 (2026-11-29), at 0.02 to 0.92 of PyTorch's speed; beside each one ahead."""
    on_gpu(monkeypatch, H200)
    with stood_in(H200):
        for extents, named in ((behind, "aten"), (ahead, family)):
            assert by_rule(Problem(direction, *extents, **options), torch.device("cpu"))[0] == named


@pytest.mark.parametrize(
    ("direction", "layout", "options", "stride", "channels", "extent", "family"),
    [
        ("fprop", "nchw", BF16, 1, 120, 56, "halo_sm80"),
        ("fprop", "nchw", TF32, 2, 48, 112, "halo_sm80"),
        ("dgrad", "nchw", BF16, 2, 888, 14, "halo_sm80"),
        ("fprop", "nhwc", TF32, 1, 336, 14, "halo_sm80"),
        ("dgrad", "nhwc", BF16, 2, 120, 56, "halo_sm80"),
        ("dgrad", "nhwc", TF32, 2, 120, 56, "halo_sm90"),
        ("dgrad", "nhwc", TF32, 1, 888, 7, "halo_sm90"),
        ("wgrad", "nhwc", BF16, 1, 888, 7, "halo_sm90"),
        ("wgrad", "nchw", TF32, 1, 336, 14, "halo_sm90"),
        ("fprop", "nhwc", BF16, 2, 888, 14, "aten"),  # 1.11 in a record
        ("fprop", "nhwc", BF16, 1, 48, 56, "aten"),  # another kernel was faster
        ("fprop", "nchw", FP32, 1, 120, 56, "aten"),
        ("fprop", "nchw", BF16, 1, 24, 14, "aten"),  # few outputs
    ],
)
def test_groups_of_24_channels_are_ours_where_records_are_ahead(
    direction: Direction, layout: str, options: dict, stride: int, channels: int, extent: int, family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """RegNetY's 3x3 layers of any number of channels: records know those of one network alone."""
    extents = (32, channels, extent, extent, channels, 3, 3, (stride, stride), (1,) * 4, (1, 1), channels // 24)
    on_gpu(monkeypatch, H200)
    with stood_in(H200):
        problem = Problem(direction, *extents, **{"precision": "ieee", **options, "layout": layout})
        assert by_rule(problem, torch.device("cpu"))[0] == family
