"""Accelerated models on two GPUs: DistributedDataParallel and FSDP2 through NCCL, DataParallel, and sharded images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import ONE_GPU
from tests.ranks import STRIDE_WARNING, run_ranks
from tests.usages import Place, assert_close

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason=ONE_GPU)
LIMIT_S = 120


@pytest.mark.parametrize("scenario", ["ddp", "ddp_channels_last", "fsdp2"])
def test_on_our_kernels(scenario: str, tmp_path: Path) -> None:
    assert STRIDE_WARNING not in run_ranks(scenario, "cuda", "direct", tmp_path / "meeting", LIMIT_S)


@pytest.mark.parametrize("scenario", ["ddp_channels_last"])
def test_auto_warns_no_more_than_pytorch(scenario: str, tmp_path: Path) -> None:
    """Where PyTorch's own layer runs in every direction its gradients are what they are without us."""
    plain = run_ranks(f"plain_{scenario}", "cuda", "auto", tmp_path / "plain", LIMIT_S)
    ours = run_ranks(scenario, "cuda", "auto", tmp_path / "ours", LIMIT_S)
    print(f"PyTorch's own layers make DDP warn of strides: {STRIDE_WARNING in plain}; auto: {STRIDE_WARNING in ours}")
    assert STRIDE_WARNING not in ours or STRIDE_WARNING in plain


def test_the_stride_warning_would_be_seen(tmp_path: Path) -> None:
    assert STRIDE_WARNING in run_ranks("other_strides", "cuda", "auto", tmp_path / "meeting", LIMIT_S)


@pytest.mark.parametrize("family", ["auto", "direct"])
def test_images_that_are_larger_than_a_gpu(family: str, tmp_path: Path) -> None:
    """Halos through NCCL, on a stream of their own: integers, gradients of gradients, too, to the bit."""
    run_ranks("spatial_devices.problems", "cuda", family, tmp_path / "meeting", 2 * LIMIT_S)


@pytest.mark.parametrize("family", ["auto", "direct"])
def test_branches_that_are_alike_have_gradients_of_gradients(family: str, tmp_path: Path) -> None:
    run_ranks("spatial_devices.branches_twice", "cuda", family, tmp_path / "meeting", LIMIT_S)


def test_data_parallel() -> None:
    """Replicas hold plain tensors instead of parameters, and run in threads."""
    on = Place("cuda", "direct", strict=True)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        ours, theirs = (net.eval() for net in on.pair())
        assert_close(nn.DataParallel(ours), nn.DataParallel(theirs), on.image(n=4))
