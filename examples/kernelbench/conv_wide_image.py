"""Dense 3x3 filters on images twice as wide as high, 64 channels to 128."""

import torch
from torch import nn

batch_size = 8
in_channels, out_channels = 64, 128
kernel_size = 3
height, width = 512, 1024


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, bias=False):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, bias=bias)

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size]
