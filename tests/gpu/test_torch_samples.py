"""PyTorch's own samples, through the public functions with our family forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import haloconv
from tests import samples
from tests.cases import DTYPES, Case, case_id
from tests.families import DIRECT
from tests.launches import launched


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_up: Callable) -> None:
    """Compile what the samples need side by side; an unbatched sample needs what its batched twin needs."""
    batched = [sample for sample in samples.op_samples("cpu", torch.float32) if sample.x.dim() == 4]
    layers = [
        Case("sample", "PyTorch's", (*s.x.shape, s.w.shape[0], *s.w.shape[2:]), samples.spec_of(s), s.b is not None)
        for s in batched
    ]
    warm_up("samples", DIRECT, ((layer, dtype) for layer in layers for dtype in DTYPES))


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_op_samples(dtype: torch.dtype, record: Callable) -> None:
    count = 0
    for sample in samples.op_samples("cuda", dtype, requires_grad=True):
        with launched() as names:
            y = haloconv.conv2d(sample.x, sample.w, sample.b, **sample.options, family="direct", strict=True)
            errors = samples.check_call(sample, y)
        for direction, error in errors.items():
            record(names, direction, DIRECT.label(dtype), error)
        count += 1
    assert count >= 30


@pytest.mark.parametrize("index", range(len(list(samples.op_errors("cpu")))))
def test_op_errors(index: int) -> None:
    error = list(samples.op_errors("cuda"))[index]
    with pytest.raises(error.error, match=error.regex):
        haloconv.conv2d(*error.args, **error.kwargs, family="direct")


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_module_samples(dtype: torch.dtype, record: Callable) -> None:
    count = 0
    for args, kwargs, x in samples.module_samples("cuda", dtype):
        own: dict[str, Any] = {**kwargs, "device": "cuda", "dtype": dtype, "family": "direct", "strict": True}
        ours = haloconv.Conv2d(*args, **own)
        options = {"padding": kwargs.get("padding", 0)}
        with launched() as names:
            errors = samples.check_call(samples.Sample(x, ours.weight, ours.bias, options), ours(x))
        for direction, error in errors.items():
            record(names, direction, DIRECT.label(dtype), error)
        count += 1
    assert count >= 4


@pytest.mark.parametrize("elsewhere", ["weight", "bias", "input"])
def test_tensors_on_different_devices_are_refused_as_torch_does(elsewhere: str) -> None:
    shapes = {"input": (2, 4, 8, 9), "weight": (6, 4, 3, 3), "bias": (6,)}
    given: dict[str, Any] = {
        n: torch.zeros(shape, device="cpu" if n == elsewhere else "cuda") for n, shape in shapes.items()
    }
    with pytest.raises(Exception) as theirs:
        torch.nn.functional.conv2d(**given)
    with pytest.raises(theirs.type, match=r"(?s)cpu.*cuda|cuda.*cpu"):
        haloconv.conv2d(**given, family="direct")
