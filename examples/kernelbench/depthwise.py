"""One 3x7 filter for each of 128 channels."""

import torch
from torch import nn

batch_size = 32
channels = 128
kernel_size = (3, 7)
height, width = 128, 256


class Model(nn.Module):
    def __init__(self, channels, kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel_size, groups=channels, bias=False)

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.rand(batch_size, channels, height, width)]


def get_init_inputs():
    return [channels, kernel_size]
