"""Swapping the convolutions of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import haloconv
from haloconv import accelerate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.again = self.first
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()])
        self.named = nn.ModuleDict({"x": nn.Conv2d(4, 4, 1, bias=False)})

    def forward(self, x):
        x = self.again(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.named["x"](x)


class Own(nn.Conv2d):
    pass


def test_every_convolution_is_swapped_and_keeps_its_weights():
    model = Block()
    before = {name: parameter for name, parameter in model.named_parameters()}
    x = torch.randn(2, 3, 12, 12)
    expected = model(x)
    swaps = accelerate(model, precision="ieee")
    assert [swap.names for swap in swaps] == [("first", "again"), ("layers.0",), ("named.x",)]
    assert [swap.name for swap in swaps] == ["first", "layers.0", "named.x"]
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    for swap in swaps:
        assert type(swap.module) is haloconv.Conv2d and swap.module.precision == "ieee"
        assert all(model.get_submodule(name) is swap.module for name in swap.names)
    torch.testing.assert_close(model(x), expected)


def test_shared_modules_stay_shared():
    model = Block()
    accelerate(model)
    assert model.first is model.again


def test_options_reach_the_modules():
    (swap,) = accelerate(nn.Sequential(nn.Conv2d(3, 3, 3)), family="aten", strict=True)
    assert (swap.module.family, swap.module.strict, swap.module.precision) == ("aten", True, None)


def test_subclasses_and_our_own_are_left_alone():
    model = nn.Sequential(Own(3, 3, 3), haloconv.Conv2d(3, 3, 3), nn.Conv1d(3, 3, 3), nn.ConvTranspose2d(3, 3, 3))
    kept = list(model)
    assert accelerate(model) == []
    assert list(model) == kept


def test_mode_and_trainability_are_kept():
    model = nn.Sequential(nn.Conv2d(3, 3, 3)).eval()
    model[0].weight.requires_grad_(False)
    accelerate(model)
    assert not model[0].training and not model[0].weight.requires_grad


def test_a_bare_convolution_has_no_parent():
    with pytest.raises(ValueError, match="from_torch"):
        accelerate(nn.Conv2d(3, 3, 3))


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="family"):
        accelerate(nn.Sequential(nn.Conv2d(3, 3, 3)), family="none")
