"""Layer C: 128 filters of 3x3, no padding, on a batch of 8 images with 64 channels, 512x1024.

The output is (8, 128, 510, 1022).
"""

import torch
from torch import nn


class Model(nn.Module):
    """One 3x3 convolution on a wide image."""

    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.rand(8, 64, 512, 1024)]


def get_init_inputs():
    return [64, 128, 3]
