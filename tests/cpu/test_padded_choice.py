"""Inference with padding modes: PyTorch's convolution of a padded copy, or one launch of a kernel that loses to it."""

from __future__ import annotations

import pytest
import torch

from haloconv.choose import padded
from haloconv.choose.choice import Choice
from haloconv.choose.padded import instead_of_copy
from haloconv.device import DeviceFacts
from haloconv.layout import Layout
from haloconv.problem import Problem
from tests.tuned import record
from tools.measured import stood_in

H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
UNKNOWN = DeviceFacts("NVIDIA H900", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
PYTORCHS, CPU = Choice("aten", "by rule"), torch.device("cpu")


def layer(layout: Layout, dtype: torch.dtype = torch.bfloat16, channels: int = 256) -> Problem:
    precision = "tf32" if dtype == torch.float32 else "ieee"
    return Problem(
        "fprop", 4, channels, 128, 128, channels, 3, 3, padding=(1,) * 4, dtype=dtype, precision=precision,
        layout=layout,
    )  # fmt: skip


@pytest.fixture
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "_recorded", lambda problem, facts: None)


@pytest.mark.parametrize(("layout", "dtype", "family"), [
    ("nhwc", torch.bfloat16, "halo_sm90"), ("nchw", torch.bfloat16, "aten"), ("nchw", torch.float32, "aten"),
    ("nhwc", torch.float64, "aten"),
])  # fmt: skip
def test_a_copy_that_takes_long_decides(
    layout: Layout, dtype: torch.dtype, family: str, nothing_recorded: None
) -> None:
    """Of channels_last images; no kernel with modes takes float64."""
    with stood_in(H200):
        found = instead_of_copy(layer(layout, dtype), CPU, PYTORCHS)
    assert found.family == family and ("behind a copy" in found.reason) == (family != "aten")


def test_what_is_ours_or_refused_stays(nothing_recorded: None) -> None:
    refused = Choice("aten", "no kernel", refused=True)
    with stood_in(H200):
        assert instead_of_copy(layer("nhwc"), CPU, refused) is refused
        ours = Choice("halo_sm90", "by rule")
        assert instead_of_copy(layer("nhwc"), CPU, ours) is ours
    with stood_in(UNKNOWN):  # whose copy rate nobody measured
        assert instead_of_copy(layer("nhwc"), CPU, PYTORCHS) is PYTORCHS


@pytest.mark.parametrize(("own", "own_ms", "wins"), [
    ("halo_sm90/conv", 0.13, True), ("halo_sm90/conv", 0.20, False), ("halo_sm80/conv", 0.13, False),
    (None, None, False),
])  # fmt: skip
def test_a_record_knows_what_the_kernel_loses(
    own: str | None, own_ms: float | None, wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In nchw the copy of 34 MB and as many written takes 0.021 ms or more; PyTorch's convolution 0.12."""
    one = layer("nchw")
    known = record(one, "aten", H200, own=own, own_ms=own_ms, aten_ms=0.12, source="")
    monkeypatch.setattr(padded, "_recorded", lambda problem, facts: known)
    with stood_in(H200):
        assert instead_of_copy(one, CPU, PYTORCHS).family == ("halo_sm90" if wins else "aten")
