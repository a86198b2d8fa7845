"""Accelerated models in two processes that talk through gloo: on PyTorch's convolution, and on our kernels emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from haloconv.emulator import available
from tests.ranks import STRIDE_WARNING, run_ranks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo to talk through"
)
LIMIT_S = 240


def test_on_pytorchs_convolution(tmp_path: Path) -> None:
    run_ranks("ddp,ddp_channels_last,fsdp2", "cpu", "auto", tmp_path / "meeting", LIMIT_S)


def test_on_our_kernels(tmp_path: Path, emulator_cache: None) -> None:
    """The gradients come from our kernels, and have the strides that DDP wants."""
    if available() is not None:
        pytest.skip(available())
    said = run_ranks("ddp_channels_last,fsdp2", "emulator", "direct", tmp_path / "meeting", LIMIT_S)
    assert STRIDE_WARNING not in said


def test_the_stride_warning_would_be_seen(tmp_path: Path) -> None:
    assert STRIDE_WARNING in run_ranks("other_strides", "cpu", "auto", tmp_path / "meeting", LIMIT_S)
