"""PyTorch's own sample and error inputs for conv2d and nn.Conv2d, on the CPU."""

from __future__ import annotations

import pytest
import torch

import haloconv
from tests import samples
from tests.cases import DTYPES, case_id

EXACT_DTYPES = (torch.int64, torch.complex64, torch.complex128, *DTYPES)
ERRORS = list(samples.op_errors("cpu"))


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_op_samples_are_torchs(dtype: torch.dtype) -> None:
    count = 0
    for sample in samples.op_samples("cpu", dtype):
        want = torch.nn.functional.conv2d(sample.x, sample.w, sample.b, **sample.options)
        got = haloconv.conv2d(sample.x, sample.w, sample.b, **sample.options)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
        count += 1
    assert count >= 30


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_op_samples_with_gradients_against_the_reference(dtype: torch.dtype) -> None:
    for sample in samples.op_samples("cpu", dtype, requires_grad=True):
        samples.check_call(sample, haloconv.conv2d(sample.x, sample.w, sample.b, **sample.options))


@pytest.mark.parametrize("error", ERRORS, ids=[f"{i}: {e.regex}" for i, e in enumerate(ERRORS)])
@pytest.mark.parametrize("family", ["auto", "direct"])
def test_op_errors(error: samples.ErrorSample, family: str) -> None:
    with pytest.raises(error.error, match=error.regex) as theirs:
        torch.nn.functional.conv2d(*error.args, **error.kwargs)
    with pytest.raises(error.error, match=error.regex) as ours:
        haloconv.conv2d(*error.args, **error.kwargs, family=family)
    assert ours.type is theirs.type


def test_there_are_error_samples() -> None:
    assert len(ERRORS) >= 8


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_module_samples(dtype: torch.dtype) -> None:
    count = 0
    for args, kwargs, x in samples.module_samples("cpu", dtype):
        ours = haloconv.Conv2d(*args, **kwargs, dtype=dtype)
        theirs = torch.nn.Conv2d(*args, **kwargs, dtype=dtype)
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(x), theirs(x))
        options = {"padding": kwargs.get("padding", 0)}
        samples.check_call(samples.Sample(x, ours.weight, ours.bias, options), ours(x))
        count += 1
    assert count >= 4
