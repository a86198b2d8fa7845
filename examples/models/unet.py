"""A U-Net: four levels of two 3x3 layers each, halved by pooling and doubled by interpolation, with skips between."""

import torch
from torch import nn

batch_size = 4
channels, classes = 64, 2
height = width = 512


def double(in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class Model(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels, 8 * channels]
        self.down = nn.ModuleList(double(*pair) for pair in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(
            double(deep + wide, wide) for deep, wide in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, x):
        skips = []
        for i, level in enumerate(self.down):
            x = level(x if i == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for level, skip in zip(self.up, skips[-2::-1], strict=True):
            x = nn.functional.interpolate(x, skip.shape[-2:], mode="nearest")
            x = level(torch.cat([skip, x], dim=1))
        return self.head(x)


def get_inputs():
    return [torch.randn(batch_size, 3, height, width)]


def get_init_inputs():
    return [channels, classes]
