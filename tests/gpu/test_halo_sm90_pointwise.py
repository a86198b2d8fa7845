"""The kernels of 1x1 layers of halo_sm90 on a GPU: the emulator's runs, and layers of real size with every config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from haloconv.families.halo_sm90.pointwise import pointwise, pointwise_planes
from haloconv.plan import form_of
from haloconv.precision import Precision
from haloconv.problem import Direction, Request
from tests import emulated_halo_sm90_planes, emulated_halo_sm90_pointwise
from tests.cases import Case, Tensors, case, make
from tests.emulated import Run
from tests.families import HALO_SM90, Subject, each_dtype, name_of, over
from tests.gpu.runs import check_every_config, check_run, runs_of

RUNS = runs_of("halo_sm90", emulated_halo_sm90_pointwise, emulated_halo_sm90_planes)
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


@pytest.mark.parametrize(("subject", "run"), over(*((HALO_SM90, run) for run in RUNS)), ids=str)
def test_run(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with tiles of the same kind."""
    check_run(subject, run, record)


@pytest.mark.parametrize("result", ["fprop", "dgrad"])
@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90,)), ids=name_of)
@pytest.mark.parametrize("one", LAYERS, ids=lambda one: one.name)
def test_every_config(subject: Subject, dtype: torch.dtype, one: Case, result: Direction, record: Callable) -> None:
    """Right, and the same bits twice, in every config that the layer has."""
    t, spec = make(one, dtype, "cuda"), subject.on(one, dtype).spec
    request = _request(one, dtype, result, t, spec.precision or "ieee")
    kernel = pointwise if pointwise.why_not(request) is None else pointwise_planes
    check_every_config(kernel, request, one, t, subject, record)


def _request(one: Case, dtype: torch.dtype, result: Direction, t: Tensors, precision: Precision) -> Request:
    problem = replace(one.problem("fprop", dtype), precision=precision).toward(result)
    first = t.x if result == "fprop" else t.dy
    return Request(problem, form_of(first), form_of(t.w), problem.layout, first.device)
