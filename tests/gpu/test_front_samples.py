"""PyTorch's own samples and error inputs for the functions and layers beside conv2d, with our family by name."""

from __future__ import annotations

import pytest
import torch

from tests import front_samples
from tests.cases import DTYPES, case_id
from tests.fronts import FRONTS

NAMES = [each.name for each in FRONTS]


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("name", NAMES)
def test_calls(name: str, dtype: torch.dtype) -> None:
    front_samples.check_calls(name, "cuda", dtype)


@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str) -> None:
    assert front_samples.check_errors(name, "cuda") >= (0 if "transpose" in name else 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str, dtype: torch.dtype) -> None:
    front_samples.check_layers(name, "cuda", dtype)
