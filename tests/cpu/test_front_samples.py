"""PyTorch's own samples and error inputs for the functions and layers beside conv2d, on the emulator."""

from __future__ import annotations

import pytest
import torch

from haloconv import emulator
from haloconv.emulator import emulated_device
from tests import front_samples
from tests.cases import case_id
from tests.fronts import FRONTS

NAMES = [each.name for each in FRONTS]
MISSING = emulator.available()
ERRORS = {"conv1d": 10, "conv3d": 10}  # PyTorch has none for transposed convolutions

pytestmark = [
    pytest.mark.usefixtures("emulator_cache"),
    pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=case_id)
@pytest.mark.parametrize("name", NAMES)
def test_calls(name: str, dtype: torch.dtype) -> None:
    with emulated_device():
        front_samples.check_calls(name, "cpu", dtype)


@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str) -> None:
    with emulated_device():
        assert front_samples.check_errors(name, "cpu") == ERRORS.get(name, 0)


@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str) -> None:
    with emulated_device():
        front_samples.check_layers(name, "cpu", torch.float32)
