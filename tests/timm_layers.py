"""Layers as timm 1.0 has them, written anew: what haloconv knows by these names must compute what these compute."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


def pad_same(x: torch.Tensor, extents: tuple, strides: tuple, dilations: tuple) -> torch.Tensor:
    """The image with zeros around it, so that a filter gives ceil(H / stride) rows and ceil(W / stride) columns."""
    rows, cols = (
        max((math.ceil(size / stride) - 1) * stride + (taps - 1) * dilation + 1 - size, 0)
        for size, taps, stride, dilation in zip(x.shape[-2:], extents, strides, dilations, strict=True)
    )
    return F.pad(x, (cols // 2, cols - cols // 2, rows // 2, rows - rows // 2))


class Conv2dSame(nn.Conv2d):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True):
        super().__init__(in_channels, out_channels, kernel_size, stride, 0, dilation, groups, bias)

    def forward(self, x):
        x = pad_same(x, self.weight.shape[-2:], self.stride, self.dilation)
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


class StdConv2d(nn.Conv2d):
    def __init__(self, in_channel, out_channels, kernel_size, stride=1, padding=1, dilation=1, groups=1, bias=False):
        super().__init__(in_channel, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.eps, self.same_pad = 1e-6, False

    def gains(self):
        return None

    def forward(self, x):
        if self.same_pad:
            x = pad_same(x, self.kernel_size, self.stride, self.dilation)
        rows = self.weight.reshape(1, self.out_channels, -1)
        rows = F.batch_norm(rows, None, None, weight=self.gains(), training=True, momentum=0.0, eps=self.eps)
        weight = rows.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class StdConv2dSame(StdConv2d):
    def __init__(
        self, in_channel, out_channels, kernel_size, stride=1, padding="SAME", dilation=1, groups=1, bias=False
    ):
        super().__init__(in_channel, out_channels, kernel_size, stride, 0, dilation, groups, bias)
        self.same_pad = True


class ScaledStdConv2d(StdConv2d):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=1, dilation=1, groups=1, bias=True):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.scale = self.weight[0].numel() ** -0.5
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def gains(self):
        return (self.gain * self.scale).view(-1)


class ScaledStdConv2dSame(ScaledStdConv2d):
    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding="SAME", dilation=1, groups=1, bias=True
    ):
        super().__init__(in_channels, out_channels, kernel_size, stride, 0, dilation, groups, bias)
        self.same_pad = True


CLASSES = {each.__name__: each for each in (Conv2dSame, StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame)}
HOME = {name: "timm.layers.conv2d_same" if name == "Conv2dSame" else "timm.layers.std_conv" for name in CLASSES}
for _name, _class in CLASSES.items():
    _class.__module__ = HOME[_name]
