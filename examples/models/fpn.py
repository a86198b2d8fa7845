"""Segmentation by a feature pyramid: a residual encoder of four levels, 1x1 laterals, a 3x3 layer on each, summed."""

import torch
from torch import nn

batch_size = 8
channels, classes = 64, 19
height = width = 512


def conv_norm(in_channels, out_channels, size, stride=1):
    conv = nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride):
        super().__init__()
        self.first = conv_norm(in_channels, out_channels, 3, stride)
        self.second = conv_norm(out_channels, out_channels, 3)
        same = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(in_channels, out_channels, 1, stride)

    def forward(self, x):
        y = self.second(nn.functional.relu(self.first(x)))
        return nn.functional.relu(y + self.shortcut(x))


class Model(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        widths, pyramid = [channels, 2 * channels, 4 * channels, 8 * channels], 4 * channels
        self.stem = nn.Sequential(conv_norm(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.levels = nn.ModuleList(
            nn.Sequential(BasicBlock(before, wide, 1 if wide == channels else 2), BasicBlock(wide, wide, 1))
            for before, wide in zip([channels, *widths], widths, strict=False)
        )
        self.laterals = nn.ModuleList(nn.Conv2d(wide, pyramid, 1) for wide in widths)
        self.smooth = nn.ModuleList(nn.Sequential(conv_norm(pyramid, 2 * channels, 3), nn.ReLU()) for _ in widths)
        self.head = nn.Conv2d(2 * channels, classes, 1)

    def forward(self, x):
        found, x = [], self.stem(x)
        for level in self.levels:
            x = level(x)
            found.append(x)
        y, total = None, 0
        for lateral, smooth, x in list(zip(self.laterals, self.smooth, found, strict=True))[::-1]:
            y = lateral(x) if y is None else lateral(x) + nn.functional.interpolate(y, x.shape[-2:], mode="nearest")
            total = total + nn.functional.interpolate(smooth(y), found[0].shape[-2:], mode="bilinear")
        return self.head(total)


def get_inputs():
    return [torch.randn(batch_size, 3, height, width)]


def get_init_inputs():
    return [channels, classes]
