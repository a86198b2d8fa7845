"""A network's first layer: square images of three channels, 11x11 filters that step four pixels."""

import torch
from torch import nn

batch_size = 256
in_channels, out_channels = 3, 96
kernel_size = 11
height = width = 224


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=4, padding=2):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding)

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size]
