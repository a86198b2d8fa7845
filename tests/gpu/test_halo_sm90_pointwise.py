"""The matrix products of halo_sm90 on a GPU: the emulator's runs, and layers of real size with every config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from haloconv.families.halo_sm90.pointwise import implicit_gemm, moments, pointwise, pointwise_planes
from haloconv.plan import form_of
from haloconv.precision import Precision
from haloconv.problem import Direction, Epilogue, Request
from tests import (
    emulated_halo_sm90_implicit_gemm,
    emulated_halo_sm90_moments,
    emulated_halo_sm90_planes,
    emulated_halo_sm90_pointwise,
    oracle,
)
from tests.cases import Case, Tensors, case, make
from tests.emulated import Run
from tests.families import HALO_SM90, HALO_SM90_MOMENTS, Subject, each_dtype, name_of, over
from tests.gpu.runs import check_every_config, check_run, runs_of
from tests.launches import launched
from tests.measured import MEASURED, MOMENTS, MOMENTS_IMAGES, with_moments

_PARTS = (emulated_halo_sm90_pointwise, emulated_halo_sm90_planes, emulated_halo_sm90_implicit_gemm)
RUNS = [(HALO_SM90, run) for run in runs_of("halo_sm90", *_PARTS)]
RUNS += [(HALO_SM90_MOMENTS, run) for run in runs_of("halo_sm90", emulated_halo_sm90_moments)]
LAYERS = tuple(
    case(f"{name}_{storage}", reason, x, filters, storage=storage)
    for storage in ("contiguous", "channels_last")
    for name, reason, x, filters in (
        ("wide", "many filters of few channels", (8, 64, 56, 56), (256, 1, 1)),
        ("narrow", "few filters of many channels", (8, 256, 56, 56), (64, 1, 1)),
        ("resnet_28", "maps of 28 columns", (16, 512, 28, 28), (128, 1, 1)),
        ("uneven", "chunks and blocks that are not full", (4, 200, 24, 40), (328, 1, 1)),
        ("deep", "few pixels of many channels", (2, 2048, 8, 8), (512, 1, 1)),
    )
) + (
    case("resnet_14", "maps of 14 columns", (16, 1024, 14, 14), (256, 1, 1), storage="channels_last"),
    case("resnet_7", "maps of 7 columns", (16, 512, 7, 7), (2048, 1, 1), storage="channels_last"),
    case("stride", "every second pixel", (8, 256, 56, 56), (512, 1, 1), stride=2, storage="channels_last"),
    case("planes_14", "planes of 14x14", (16, 1024, 14, 14), (256, 1, 1)),
    case("planes_7", "planes of 7x7", (16, 512, 7, 7), (2048, 1, 1)),
    case("planes_stride", "every second pixel of planes", (16, 512, 28, 28), (1024, 1, 1), stride=2),
    case("planes_bands", "bands of rows", (8, 256, 56, 56), (512, 1, 1), stride=2),
    case("planes_uneven", "few images, chunks and blocks that are not full", (5, 888, 7, 7), (328, 1, 1)),
)  # fmt: skip
OF_TAPS = tuple(
    case(f"taps_{name}", reason, x, filters, storage="channels_last", w_storage="channels_last", **fields)
    for name, reason, x, filters, fields in (
        ("aspp_12", "taps that are 12 pixels apart", (4, 2048, 64, 64), (256, 3, 3), {"padding": 12, "dilation": 12}),
        ("aspp_36", "taps that are 36 pixels apart", (4, 2048, 64, 64), (256, 3, 3), {"padding": 36, "dilation": 36}),
        ("resnet_56", "maps of 56 columns", (16, 64, 56, 56), (64, 3, 3), {"padding": 1}),
        ("resnet_28", "maps of 28 columns", (16, 128, 28, 28), (128, 3, 3), {"padding": 1}),
        ("resnet_14", "maps of 14 columns", (16, 256, 14, 14), (256, 3, 3), {"padding": 1}),
        ("resnet_7", "maps of 7 columns", (16, 512, 7, 7), (512, 3, 3), {"padding": 1}),
        ("unet_64", "maps of 64 columns", (2, 320, 64, 64), (320, 3, 3), {"padding": 1}),
        ("stride", "every second pixel", (8, 256, 56, 56), (256, 3, 3), {"padding": 1, "stride": 2}),
        ("deep", "few pixels of many channels", (2, 1280, 8, 8), (1280, 3, 3), {"padding": 1}),
        ("uneven", "chunks and blocks that are not full", (4, 200, 24, 40), (328, 5, 3), {"padding": (2, 1)}),
        ("sides", "padding that differs on every side", (3, 136, 31, 45), (72, 2, 3), {"padding": (0, 3, 5, 1)}),
    )
) + (
    case("taps_packed", "filters that TMA does not reach", (8, 136, 30, 45), (200, 3, 3), padding=1,
         storage="channels_last"),
    case("taps_planes_56", "planes of 56x56, copied", (16, 64, 56, 56), (64, 3, 3), padding=1),
    case("taps_planes_28", "planes of 28x28, copied", (16, 128, 28, 28), (128, 3, 3), padding=1),
    case("taps_planes_14", "planes of 14x14, two blocks for a tile", (16, 256, 14, 14), (256, 3, 3), padding=1),
    case("taps_planes_7", "planes of 7x7, two blocks for a tile", (16, 512, 7, 7), (512, 3, 3), padding=1),
    case("taps_planes_stride", "every second pixel of planes", (8, 256, 28, 28), (256, 3, 3), padding=1, stride=2),
    case("taps_planes_uneven", "planes, chunks and blocks that are not full", (3, 200, 15, 13), (328, 3, 3), padding=1),
)  # fmt: skip
KERNELS = (pointwise, pointwise_planes, implicit_gemm)


@pytest.mark.parametrize(("subject", "run"), over(*RUNS), ids=str)
def test_run(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with tiles of the same kind."""
    check_run(subject, run, record)


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90,)), ids=name_of)
@pytest.mark.parametrize(
    ("one", "result"),
    [
        (one, result)
        for one in (*LAYERS, *OF_TAPS)
        for result in ("fprop", "dgrad")
        if result == "fprop" or one in LAYERS or one.spec.stride == (1, 1)
    ],
    ids=name_of,
)
def test_every_config(subject: Subject, dtype: torch.dtype, one: Case, result: Direction, record: Callable) -> None:
    """Right, and the same bits twice, in every config that the layer has."""
    t, spec = make(one, dtype, "cuda"), subject.on(one, dtype).spec
    request = _request(one, dtype, result, t, spec.precision or "ieee")
    kernel = next(each for each in KERNELS if each.why_not(request) is None)
    check_every_config(kernel, request, one, t, subject, record)


@pytest.mark.parametrize("result", MEASURED)
@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90_MOMENTS,)), ids=name_of)
@pytest.mark.parametrize("one", [one for one in (*LAYERS, *OF_TAPS) if one.storage == "channels_last"], ids=name_of)
def test_what_is_stored_is_measured(
    subject: Subject, dtype: torch.dtype, one: Case, result: str, record: Callable
) -> None:
    """In every config: the bits that the convolution alone has, statistics of these, and the same bits twice."""
    t, spec = make(one, dtype, "cuda"), subject.on(one, dtype).spec
    t = t._replace(b=None) if result == MOMENTS else t
    request = _request(one, dtype, "fprop", t, spec.precision or "ieee")
    added = Epilogue(residual=result != MOMENTS)
    request = replace(request, problem=replace(request.problem, bias=t.b is not None, epilogue=added))
    plain = implicit_gemm if max(one.extents[5:]) > 1 else pointwise
    configs, per_image = plain.configs(request), result == MOMENTS_IMAGES
    measured = [config for config in configs if moments.has_moments(request, config, per_image)]
    if per_image and not measured:
        pytest.skip("a box has pixels of two images")
    assert len(measured) == sum(config.derived.parts == 1 for config in configs)
    operands = (t.x, t.w, t.b, *[t.dy] * added.residual)
    for config in measured:
        want = plain.bind(request, config)(*operands)
        with oracle.Unchanged(t), oracle.RedZones("cuda") as zones, launched() as names:
            run = moments.bind(request, config, per_image)
            got, again = run(*operands), run(*operands)
        assert all(oracle.same_bits(each, other) for each, other in zip(got, again, strict=True))
        assert oracle.same_bits(got[0], want)
        zones.check()
        error = oracle.check(result, with_moments(*got), t, spec)
        record(names, result, subject.label(dtype), error.norm)


def _request(one: Case, dtype: torch.dtype, result: Direction, t: Tensors, precision: Precision) -> Request:
    problem = replace(one.problem("fprop", dtype), precision=precision).toward(result)
    first = t.x if result == "fprop" else t.dy
    return Request(problem, form_of(first), form_of(t.w), problem.layout, first.device)
