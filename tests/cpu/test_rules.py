"""Rules that decide without a measurement."""

from __future__ import annotations

import pytest
import torch

from haloconv.rules import bgrad_by_rule


@pytest.mark.parametrize(
    ("dy", "family"),
    [
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), "aten"),
        (torch.empty(2, 2, 4, 5).to(memory_format=torch.channels_last), "aten"),
        (torch.empty(2, 4, 4, 5).to(memory_format=torch.channels_last), "direct"),
        (torch.empty(2, 3, 4, 5), "direct"),
        (torch.empty(2, 1, 4, 5).to(memory_format=torch.channels_last), "direct"),
        (torch.empty(2, 8, 4, 5).to(memory_format=torch.channels_last)[:, :3], "direct"),
    ],
)
def test_two_or_three_neighbouring_channels_are_summed_by_pytorch(dy: torch.Tensor, family: str) -> None:
    assert bgrad_by_rule(dy.shape, dy.stride())[0] == family
