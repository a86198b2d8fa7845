"""Every usage of an accelerated model on the CPU: around PyTorch's own convolution, and around our kernels emulated."""

from __future__ import annotations

import pytest

from haloconv.emulator import available, emulated_device
from tests.usages import USAGES, Place

SLOW = ("other_dtypes", "compiled")  # on the emulator: kernels for each dtype; the GPU tests run them


@pytest.mark.parametrize("usage", USAGES)
def test_usage(usage: str, own_autograd: None) -> None:
    """``own_autograd``: the gradients are those of haloconv.autograd, as they are where our kernels run."""
    USAGES[usage](Place("cpu"))


@pytest.mark.parametrize("usage", [usage for usage in USAGES if usage not in SLOW])
def test_usage_of_our_kernels(usage: str, emulator_cache: None) -> None:
    if available() is not None:
        pytest.skip(available())
    with emulated_device():
        USAGES[usage](Place("cpu", "direct", strict=True))
