"""Modules that hold a convolution and what follows it, as people write them, for the tests of haloconv.fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from haloconv.choose.choice import Choice
from haloconv.fusion import call as fused_call

Model = TypeVar("Model", bound=nn.Module)


def settled(model: Model) -> Model:
    """The model in evaluation mode, with statistics and weights of norms that are not those that it was made with."""
    new = torch.Generator().manual_seed(0)
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            tensors = (each.running_mean, each.weight, each.bias)
            for tensor in (each for each in tensors if each is not None):
                tensor.data.normal_(generator=new)
            if each.running_var is not None:
                each.running_var.uniform_(0.5, 2, generator=new)
    return model.eval()


class ConvNormActivation(nn.Sequential):
    """torchvision's Conv2dNormActivation."""

    def __init__(self, channels: int, filters: int, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__(
            nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), activation(inplace=True)
        )


class BatchNormAct(nn.BatchNorm2d):
    """timm's BatchNormAct2d."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        average_factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = functional.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            average_factor,
            self.eps,
        )
        return self.act(self.drop(x))


class ConvNormAct(nn.Module):
    """timm's ConvNormAct."""

    def __init__(self, channels: int, filters: int, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, filters, 1), BatchNormAct(filters, act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x))


class BasicBlock(nn.Module):
    """torchvision's."""

    def __init__(self, channels: int, filters: int, stride: int = 1, projects: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(filters), nn.BatchNorm2d(filters), nn.ReLU(inplace=True)
        self.downsample = None
        if projects:
            projection = nn.Conv2d(channels, filters, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(filters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """timm's, without what its options add."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(*pair, size, padding=size // 2, bias=False)
            for pair, size in (((channels, inner), 1), ((inner, inner), 3), ((inner, channels), 1))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(filters) for filters in (inner, inner, channels))
        self.act3, self.drop_path = nn.ReLU(inplace=True), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if index < 2:
                y = functional.relu(y, inplace=True)
        y = self.drop_path(y)
        y += x
        return self.act3(y)


class Written(nn.Module):
    """Layers that a function calls: ``body(module, x)`` is its forward."""

    def __init__(self, body: Callable, **layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def once(self: Written, x: torch.Tensor) -> torch.Tensor:
    return self.act(self.norm(self.conv(x)))


def chain(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return settled(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), *(last or [nn.ReLU()])))


def image(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, y: y + 1)
    return layer


def replaced(layer: nn.Module) -> nn.Module:
    layer.forward = lambda x: x * 2
    return layer


def chosen(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Let this family be chosen in fused calls; PyTorch's convolution runs, for there is no device."""
    monkeypatch.setattr(fused_call, "choose_now", lambda request, asked: Choice(family, "chosen by the test"))
