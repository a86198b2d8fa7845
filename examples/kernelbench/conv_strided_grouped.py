"""Grouped 3x3 filters that halve the image: 32 groups of eight channels."""

import torch
from torch import nn

batch_size = 32
in_channels, out_channels = 256, 256
kernel_size = 3
stride, padding, groups = 2, 1, 32
height = width = 112


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, groups):
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, groups=groups, bias=False
        )

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, padding, groups]
