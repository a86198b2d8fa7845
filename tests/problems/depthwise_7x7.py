"""A block as in ConvNeXt: a depthwise 7x7 layer, a norm over channels, and a residual sum."""

import torch
from torch import nn


class Model(nn.Module):
    """A depthwise convolution between other modules, with defaults for every argument."""

    def __init__(self, channels=96, kernel_size=7):
        super(Model, self).__init__()  # noqa: UP008  the old form names the class
        self.depthwise = nn.Conv2d(channels, channels, kernel_size, padding="same", groups=channels)
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x):
        return x + self.norm(self.depthwise(x))


def get_inputs():
    return [torch.randn(16, 96, 56, 56)]


def get_init_inputs():
    return []
