"""PyTorch's own samples and error inputs for the functions and layers beside conv2d, on the emulator."""

from __future__ import annotations

import pytest
import torch

from haloconv import emulator
from haloconv.emulator import emulated_device
from tests import front_samples
from tests.fronts import FRONTS

NAMES = [each.name for each in FRONTS]
MISSING = emulator.available()
ERRORS = {"conv1d": 10, "conv3d": 10}  # PyTorch has none for transposed convolutions

pytestmark = [
    pytest.mark.usefixtures("emulator_cache"),
    pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}"),
]


@pytest.mark.parametrize("name", NAMES)
def test_calls(name: str) -> None:
    """In one dtype: others are drawn by the fuzzer, and run on a GPU."""
    with emulated_device():
        front_samples.check_calls(name, "cpu", torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str) -> None:
    with emulated_device():
        assert front_samples.check_errors(name, "cpu") == ERRORS.get(name, 0)


@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str) -> None:
    with emulated_device():
        front_samples.check_layers(name, "cpu", torch.float32)
