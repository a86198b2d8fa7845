"""Every usage of an accelerated model on the CPU, where PyTorch's own convolution runs inside our layers."""

from __future__ import annotations

import pytest

from tests.usages import USAGES, Place


@pytest.mark.parametrize("usage", USAGES)
def test_usage(usage: str, own_autograd: None) -> None:
    """``own_autograd``: the gradients are those of haloconv.autograd, as they are where our kernels run."""
    USAGES[usage](Place("cpu"))
