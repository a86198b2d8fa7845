"""The weight gradient by descriptor of halo_sm90 on a GPU: the emulator's runs, real layers with every config."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from haloconv.families.halo_sm90.wgrad_ss import wgrad_ss
from haloconv.layout import Layout
from haloconv.plan import form_of
from haloconv.problem import Request
from tests import emulated_halo_sm90_wgrad_ss
from tests.cases import Case, case, make
from tests.emulated import Run
from tests.families import HALO_SM90_WGRAD, Subject, name_of, over
from tests.gpu.runs import check_every_config, check_run, runs_of

RUNS = runs_of("halo_sm90", emulated_halo_sm90_wgrad_ss)
LAYERS = tuple(
    case(f"{name}_{storage}", reason, *shape, storage=storage, **layer)
    for storage in ("contiguous", "channels_last")
    for name, reason, shape, layer in (
        ("resnet_56", "rows of 56 pixels", ((8, 64, 56, 56), (64, 3, 3)), {"padding": 1}),
        ("resnet_28", "rows of 28 pixels", ((16, 128, 28, 28), (128, 3, 3)), {"padding": 1}),
        ("resnet_14", "rows of 14 pixels", ((16, 256, 14, 14), (256, 3, 3)), {"padding": 1}),
        ("resnet_7", "rows of 7 pixels", ((16, 512, 7, 7), (512, 3, 3)), {"padding": 1}),
        ("uneven", "channels and filters that fill no tile", ((8, 104, 14, 14), (88, 3, 3)), {"padding": 1}),
        ("row_filter", "a row of 15 taps", ((4, 64, 32, 128), (64, 1, 15)), {"padding": (0, 7)}),
        ("aspp", "far taps", ((2, 128, 32, 32), (64, 3, 3)), {"padding": 12, "dilation": 12}),
        ("pointwise_28", "1x1 of maps of 28 columns", ((8, 256, 28, 28), (128, 1, 1)), {}),
        ("pointwise_14", "1x1 of maps of 14 columns", ((8, 256, 14, 14), (1024, 1, 1)), {}),
        ("pointwise_7", "1x1 of maps of 7 columns", ((8, 512, 7, 7), (2048, 1, 1)), {}),
        ("pointwise_stride", "1x1 of every second pixel", ((8, 256, 28, 28), (128, 1, 1)), {"stride": 2}),
    )
)  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16)
ON_HOPPER = over(*((HALO_SM90_WGRAD, dtype) for dtype in DTYPES))


@pytest.mark.parametrize(("subject", "run"), over(*((HALO_SM90_WGRAD, run) for run in RUNS)), ids=str)
def test_run(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with tiles of the same kind."""
    check_run(subject, run, record)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(("subject", "dtype"), ON_HOPPER, ids=name_of)
@pytest.mark.parametrize("one", LAYERS, ids=lambda one: one.name)
def test_every_config(subject: Subject, dtype: torch.dtype, one: Case, layout: Layout, record: Callable) -> None:
    """Right, and the same bits twice, in every config that the layer has and in both orders of dw."""
    t = make(one, dtype, "cuda")
    request = Request(one.problem("wgrad", dtype), form_of(t.dy), form_of(t.x), layout, t.dy.device)
    check_every_config(wgrad_ss, request, one, t, subject, record)
