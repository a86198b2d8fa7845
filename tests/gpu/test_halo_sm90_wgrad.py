"""The weight gradient of halo_sm90 on a GPU: the emulator's runs, layers of real size with every config, long sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from haloconv.families.halo_sm90.wgrad import wgrad
from haloconv.plan import form_of
from haloconv.precision import Precision
from haloconv.problem import Request
from tests import emulated_halo_sm90_wgrad, oracle
from tests.cases import Case, case, make
from tests.emulated import Run
from tests.families import HALO_SM90_WGRAD, Subject, each_dtype, each_subject, name_of, over
from tests.gpu.runs import check_every_config, check_run, runs_of

RUNS = runs_of("halo_sm90", emulated_halo_sm90_wgrad)
LAYERS = tuple(
    case(f"{name}_{storage}", reason, *shape, storage=storage, **layer)
    for storage in ("contiguous", "channels_last")
    for name, reason, shape, layer in (
        ("a", "case A, smaller images", ((2, 32, 128, 256), (64, 5, 9)), {"padding": (2, 4), "dilation": (2, 3)}),
        ("c", "case C, smaller images: rows of dy that are not aligned", ((2, 64, 64, 256), (128, 3, 3)), {}),
        ("unet", "wide layers", ((2, 128, 64, 64), (96, 3, 3)), {"padding": 1}),
        ("row_filter", "a row of 15 taps", ((4, 64, 32, 128), (64, 1, 15)), {"padding": (0, 7)}),
        ("aspp", "far taps", ((2, 128, 64, 64), (64, 3, 3)), {"padding": 12, "dilation": 12}),
        ("resnet_56", "rows of 56 pixels", ((8, 64, 56, 56), (64, 3, 3)), {"padding": 1}),
        ("resnet_14", "rows of 14 pixels", ((16, 256, 14, 14), (256, 3, 3)), {"padding": 1}),
        ("resnet_7", "rows of 7 pixels", ((16, 512, 7, 7), (512, 3, 3)), {"padding": 1}),
        ("groups", "groups of 24", ((8, 96, 28, 28), (96, 3, 3)), {"padding": 1, "groups": 4}),
        ("pointwise", "1x1", ((8, 256, 28, 28), (128, 1, 1)), {}),
        ("pointwise_14", "1x1 of maps of 14 columns", ((8, 256, 14, 14), (128, 1, 1)), {}),
        ("pointwise_stride", "1x1 of every second pixel", ((8, 256, 28, 28), (128, 1, 1)), {"stride": 2}),
        ("stride", "3x3 of every second pixel", ((8, 64, 56, 56), (96, 3, 3)), {"padding": 1, "stride": 2}),
        ("stride_5x5", "strides, dilations", ((2, 64, 64, 66), (64, 5, 5)), {"stride": (3, 2), "dilation": (2, 3)}),
    )
)  # fmt: skip
LONG = case("long", "two million pixels", (2, 8, 1024, 1024), (16, 1, 3), padding=(0, 1))


@pytest.mark.parametrize(("subject", "run"), over(*((HALO_SM90_WGRAD, run) for run in RUNS)), ids=str)
def test_run(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with the same tiles."""
    check_run(subject, run, record)


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90_WGRAD,)), ids=name_of)
@pytest.mark.parametrize("one", LAYERS, ids=lambda one: one.name)
def test_every_config(subject: Subject, dtype: torch.dtype, one: Case, record: Callable) -> None:
    """Right, and the same bits twice, in every config that the layer has."""
    t, spec = make(one, dtype, "cuda"), subject.on(one, dtype).spec
    check_every_config(wgrad, _request(one, dtype, t.dy, t.x, spec.precision or "ieee"), one, t, subject, record)


@pytest.mark.parametrize("subject", each_subject((HALO_SM90_WGRAD,)), ids=name_of)
@pytest.mark.parametrize("one", LAYERS, ids=lambda one: one.name)
def test_three_products_in_every_config(subject: Subject, one: Case) -> None:
    """fp32 as two TF32 values each is within the limits of fp32, with the same bits twice."""
    spec = subject.on(one, torch.float32).spec._replace(precision="tf32x3")
    for kind in ("normal", "positive"):
        t = make(one, torch.float32, "cuda", kind)
        want, configs = oracle.expected("wgrad", t, spec), wgrad.configs(_request(one, t.x.dtype, t.dy, t.x, "tf32x3"))
        assert configs
        for config in configs:
            run = wgrad.bind(_request(one, t.x.dtype, t.dy, t.x, "tf32x3"), config)
            got, again = run(t.dy, t.x), run(t.dy, t.x)
            error = oracle.check("wgrad", got, t, spec, want=want)
            assert oracle.same_bits(got, again)
            print(f"{one.name} {kind} tf32x3 {config.key}: norm {error.norm:.2e}")


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90_WGRAD,)), ids=name_of)
def test_long_sums_of_one_sign(subject: Subject, dtype: torch.dtype) -> None:
    """wgmma cuts its sums; they are promoted often enough that nothing of it is left in the result."""
    forced = subject.on(LONG, dtype)
    t = make(forced, dtype, "cuda", "positive")
    scale = 2.0**-6 if dtype == torch.float16 else 1.0  # sums that fp16 holds
    t = t._replace(dy=t.dy * scale)
    oracle.check("wgrad", oracle.run("wgrad", t, forced), t, forced.spec)


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90_WGRAD,)), ids=name_of)
def test_the_same_bits_beside_other_work(subject: Subject, dtype: torch.dtype) -> None:
    forced = subject.on(next(one for one in LAYERS if one.name == "resnet_56_contiguous"), dtype)
    t = make(forced, dtype, "cuda")
    first, beside = oracle.run("wgrad", t, forced), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(beside):
            torch.randn(1 << 22, device="cuda").sort()
        assert oracle.same_bits(oracle.run("wgrad", t, forced), first)


def _request(one: Case, dtype: torch.dtype, dy: torch.Tensor, x: torch.Tensor, precision: Precision) -> Request:
    problem = replace(one.problem("wgrad", dtype), precision=precision)
    return Request(problem, form_of(dy), form_of(x), "nchw", dy.device)
