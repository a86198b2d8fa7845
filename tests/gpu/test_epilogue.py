"""Epilogues on a GPU: a scale and a residual in every tiling of halo_sm90, and every activation in every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch

from haloconv import plan
from haloconv.epilogue import applied, bias_and_scale
from haloconv.families.halo_sm90.pointwise import implicit_gemm
from haloconv.precision import Precision
from haloconv.problem import ACTIVATIONS, ConvSpec, Epilogue
from tests import oracle
from tests.cases import Case, case_id, make, pick
from tests.exact import make_exact
from tests.families import HALO_SM80, HALO_SM90, Subject, each_dtype, name_of, over
from tests.launches import launched
from tests.tilings import nth_tiling

LAYERS = {  # the family, extents of x and w, and the kernel that runs them in either order of memory
    "conv": (HALO_SM90, (4, 64, 30, 40), (72, 64, 3, 3), ("halo_sm90/conv",)),
    "taps": (HALO_SM90, (4, 72, 30, 40), (64, 72, 3, 3), ("halo_sm90/implicit_gemm", "halo_sm90/conv")),
    "pointwise": (HALO_SM90, (4, 128, 16, 16), (136, 128, 1, 1), ("halo_sm90/pointwise",)),
    "planes": (HALO_SM90, (8, 64, 7, 7), (72, 64, 1, 1), ("halo_sm90/pointwise_planes", "halo_sm90/pointwise")),
    "stem": (HALO_SM80, (4, 3, 61, 80), (64, 3, 7, 7), ("halo_sm80/conv",)),
    "groups": (HALO_SM80, (4, 72, 28, 31), (72, 24, 3, 3), ("halo_sm80/conv",)),
}
OF_LAYERS = over(*((found[0], dtype, layer) for layer, found in LAYERS.items() for dtype in found[0].dtypes))
SLOPE = 1.13  # of the steepest activation, by which it enlarges an error


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90,)), ids=name_of)
@pytest.mark.parametrize("one", pick("channels_last", "wide", "odd_widths"), ids=case_id)
@pytest.mark.parametrize("result", [oracle.SCALE_RELU, oracle.SCALE_RESIDUAL])
def test_every_tiling(result: str, one: Case, subject: Subject, dtype: torch.dtype, record: Callable) -> None:
    """With a scale and ReLU, and with a scale and a residual: random values, and integers to the bit."""
    forced = subject.on(one, dtype)
    t, exact = make(forced, dtype, "cuda"), make_exact(forced, dtype, "cuda")
    want = oracle.expected(result, t, forced.spec)
    index, most = 0, 1
    while index < most:
        with nth_tiling(index) as seen, launched() as names:
            got, integers = oracle.run(result, t, forced), oracle.run(result, exact, forced)
        most, index = seen["most"], index + 1
        error = oracle.check(result, got, t, forced.spec, want=want)
        oracle.check_exact(result, integers, exact, forced.spec)
        record(names, result, subject.label(dtype), error.norm)
        record(names, result, subject.label(dtype), kind="exact")


@pytest.mark.parametrize(("subject", "dtype", "layer"), OF_LAYERS, ids=name_of)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_every_activation(
    order: torch.memory_format, subject: Subject, dtype: torch.dtype, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, x_shape, w_shape, kernels = LAYERS[layer]
    monkeypatch.setattr(implicit_gemm, "cycles", lambda *_: 0.0 if layer == "taps" else math.inf)
    new = torch.Generator("cuda").manual_seed(0)
    x, w, b = (torch.randn(shape, generator=new, device="cuda").to(dtype) for shape in (x_shape, w_shape, w_shape[:1]))
    x, w = x.to(memory_format=order), w * (w[0].numel() ** -0.5)
    pairs = bias_and_scale(b, torch.linspace(-2, 2, w_shape[0], device="cuda"), dtype)
    padding, groups = (w_shape[2] // 2,) * 4, x_shape[1] // w_shape[1]
    spec = _spec(subject, dtype, groups)._replace(padding=padding)
    sums = torch.conv2d(x.double(), w.double(), None, padding=padding[0], groups=groups)
    residual = torch.randn(sums.shape, generator=new, device="cuda").to(dtype).to(memory_format=order)
    limit = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for name, has_scale, has_residual in product((None, *ACTIVATIONS), (False, True), (False, True)):
        epilogue, third = Epilogue(has_scale, name, has_residual), pairs if has_scale else b
        added = [residual] * has_residual
        bound = plan.plan_fprop(x, w, third, spec, epilogue, *added)
        before = sums if has_scale else sums + b.double()[:, None, None]
        want = applied(before, pairs.double(), epilogue, *(each.double() for each in added))
        got = bound.run(x, w, third, *added)
        assert bound.choice.kernel in kernels
        assert (got.double() - want).abs().max() <= SLOPE * limit * (1 + want.abs().max()), epilogue


def _spec(subject: Subject, dtype: torch.dtype, groups: int) -> ConvSpec:
    """What forces the family."""
    precision: Precision | None = "tf32" if dtype == torch.float32 else None
    return ConvSpec(groups=groups, family=subject.name, strict=True, precision=precision)


@pytest.mark.parametrize(("subject", "dtype", "layer"), OF_LAYERS, ids=name_of)
def test_a_residual_of_any_strides(subject: Subject, dtype: torch.dtype, layer: str) -> None:
    """Integers, to the bit: in either order, expanded, and where it begins at an odd element."""
    _, x_shape, w_shape, _ = LAYERS[layer]
    new = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randint(-2, 3, shape, generator=new, device="cuda").to(dtype) for shape in (x_shape, w_shape))
    groups = x_shape[1] // w_shape[1]
    spec, epilogue = _spec(subject, dtype, groups), Epilogue(activation="relu", residual=True)
    sums = torch.conv2d(x.double(), w.double(), groups=groups)
    dense = torch.randint(-2, 3, sums.shape, generator=new, device="cuda").to(dtype)
    odd = torch.cat((dense.flatten()[:1], dense.flatten()))[1:].view(dense.shape)
    for given in (dense, odd, dense.to(memory_format=torch.channels_last), dense[:, :1].expand(dense.shape)):
        got = plan.plan_fprop(x, w, None, spec, epilogue, given).run(x, w, None, given)
        assert torch.equal(got, torch.relu(sums + given.double()).to(dtype))
