"""Dense 5x9 filters, padded by (2, 4) and dilated by (2, 3)."""

import torch
from torch import nn

batch_size = 8
in_channels, out_channels = 32, 64
kernel_size = (5, 9)
padding, dilation = (2, 4), (2, 3)
height = width = 512


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, padding, dilation):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding, dilation=dilation, bias=False)

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, padding, dilation]
