"""The bias of a transposed layer: added to fp32 sums by kernels that can, by a pass of PyTorch's where they cannot."""

from __future__ import annotations

import pytest
import torch

import haloconv
from haloconv import emulator, plan
from haloconv.emulator import emulated_device
from haloconv.families.base import BoundCall
from haloconv.families.halo_sm90.pointwise import implicit_gemm
from tests.cases import generator
from tests.exact import integers
from tests.launches import launched

MISSING = emulator.available()
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}"),
    pytest.mark.usefixtures("emulator_cache"),
]
ORDERS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> list[BoundCall]:
    """What is followed by an addition of PyTorch's."""
    seen: list[BoundCall] = []
    followed = plan.biased
    monkeypatch.setattr(plan, "biased", lambda run: (seen.append(run), followed(run))[1])
    return seen


@pytest.fixture
def by_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where halo_sm90/implicit_gemm takes a layer it is ahead of conv."""
    monkeypatch.setattr(implicit_gemm, "cycles", lambda *_: 0.0)


@pytest.mark.usefixtures("by_taps")
@pytest.mark.parametrize(
    ("layout", "dtype", "shape", "filters", "stride", "kernels"),
    [
        ("nchw", torch.float16, (2, 32, 7, 9), (24, 4, 4), 2, {"halo_sm90/conv"}),
        ("nhwc", torch.bfloat16, (2, 32, 7, 8), (24, 3, 3), 2, {"halo_sm90/conv"}),
        ("nchw", torch.float32, (1, 16, 5, 6), (16, 2, 2), 3, {"halo_sm90/conv"}),  # pixels that no tap reaches
        ("nhwc", torch.bfloat16, (2, 32, 7, 8), (24, 3, 3), 1, {"halo_sm90/implicit_gemm"}),
        ("nhwc", torch.float32, (2, 32, 7, 8), (24, 2, 3), 1, {"halo_sm90/implicit_gemm"}),
        ("nhwc", torch.float16, (2, 64, 6, 5), (72, 1, 1), 1, {"halo_sm90/pointwise"}),
        ("nhwc", torch.float16, (2, 64, 6, 5), (72, 1, 1), 2, {"halo_sm90/conv"}),  # the same
        ("nchw", torch.float16, (2, 64, 8, 8), (72, 1, 1), 1, {"halo_sm90/pointwise_planes", "halo_sm90/pointwise"}),
        ("nchw", torch.float32, (2, 4, 5, 6), (6, 2, 2), 3, {"halo_sm80/conv"}),  # pixels that no tap reaches
        ("nhwc", torch.bfloat16, (2, 8, 7, 5), (10, 3, 3), 2, {"halo_sm80/conv"}),
    ],
)
def test_kernels_add_it(
    layout: str, dtype: torch.dtype, shape: tuple[int, ...], filters: tuple[int, ...], stride: int, kernels: set[str],
    additions: list[BoundCall],
) -> None:  # fmt: skip
    gen = generator("transposed bias", "cpu")
    x = integers(shape, dtype, gen).contiguous(memory_format=ORDERS[layout])
    w, b = integers((shape[1], *filters), dtype, gen), integers((2 * filters[0],), dtype, gen)[::2]
    precision = "tf32" if dtype == torch.float32 else None
    family = min(kernels).partition("/")[0]
    with emulated_device(), launched() as names:
        y = haloconv.conv_transpose2d(x, w, b, stride, family=family, strict=True, precision=precision)
    assert names & kernels and not additions
    assert torch.equal(y, torch.conv_transpose2d(x.double(), w.double(), b.double(), stride).to(dtype))


@pytest.mark.parametrize(("dtype", "stride"), [(torch.bfloat16, (1, 2)), (torch.float16, 2), (torch.float32, 3)])
def test_a_kernel_that_clears_pixels_between_outputs_is_followed_by_an_addition(
    dtype: torch.dtype, stride: int | tuple[int, int], additions: list[BoundCall]
) -> None:
    """`pointwise_planes` writes zeros there (found by the fuzzer: the bias was missing)."""
    gen = generator("transposed bias", "cpu")
    x, w, b = (integers(shape, dtype, gen) for shape in ((2, 64, 8, 6), (64, 72, 1, 1), (72,)))
    with emulated_device(), launched() as names:
        y = haloconv.conv_transpose2d(x, w, b, stride, family="halo_sm90", strict=True, precision="tf32")
    assert "halo_sm90/pointwise_planes" in names and len(additions) == 1
    want = torch.conv_transpose2d(x.double(), w.double(), None, stride).to(dtype) + b[:, None, None]
    assert torch.equal(y, want)


def test_others_are_followed_by_an_addition(additions: list[BoundCall]) -> None:
    gen = generator("transposed bias", "cpu")
    x, w, b = (integers(shape, torch.float32, gen) for shape in ((1, 4, 5, 6), (4, 3, 3, 3), (3,)))
    with emulated_device(), launched() as names:
        y = haloconv.conv_transpose2d(x, w, b, 2, family="direct", strict=True)
        bare = haloconv.conv_transpose2d(x, w, None, 2, family="direct", strict=True)
    assert names == {"direct/direct"} and len(additions) == 1
    assert torch.equal(y, bare + b[:, None, None]) and torch.equal(y, torch.conv_transpose2d(x, w, b, 2))


def test_gradients_go_on_without_it(own_autograd: None) -> None:
    """dx is a forward pass without a bias, whose own gradient is the transposed layer again."""
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *each: haloconv.conv_transpose2d(*each, stride=2), (x, w, b))
    assert torch.autograd.gradgradcheck(lambda *each: haloconv.conv_transpose2d(*each, stride=2), (x, w, b))
