"""The first layers of a network as in ResNeXt: a strided 7x7 stem of 3 channels, then a grouped 3x3."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn import Conv2d


def make_activation():
    return nn.ReLU(inplace=True)


class Model(nn.Module):
    """Two convolutions, one made by each name that PyTorch has for the class, and modules between them."""

    def __init__(self, width: int = 64, groups: int = 8):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        grouped = Conv2d(width, width, 3, 2, 1, groups=groups)
        self.body = nn.Sequential(nn.BatchNorm2d(width), make_activation(), grouped)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, x):
        return self.body(self.stem(x))


def get_inputs():
    return [torch.randn(16, 3, 224, 224)]


def get_init_inputs():
    return [64, 8]


if __name__ == "__main__":
    print(Model(*get_init_inputs())(*get_inputs()).shape)
