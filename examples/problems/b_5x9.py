"""Layer B: 64 filters of 5x9, no padding and no dilation, on a batch of 8 images with 32 channels, 512x512.

The output is (8, 64, 508, 504).
"""

import torch
from torch import nn


class Model(nn.Module):
    """One convolution with an asymmetric filter."""

    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.rand(8, 32, 512, 512)]


def get_init_inputs():
    return [32, 64, (5, 9)]
