"""The decoder of an image autoencoder: residual 3x3 layers on a latent image that is doubled three times."""

import torch
from torch import nn

batch_size = 2
latent_channels, channels = 4, 128
height = width = 48


class Residual(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.norm1 = nn.GroupNorm(min(32, in_channels), in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(min(32, out_channels), out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        y = self.conv1(nn.functional.silu(self.norm1(x)))
        y = self.conv2(nn.functional.silu(self.norm2(y)))
        return self.shortcut(x) + y


class Model(nn.Module):
    def __init__(self, latent_channels, channels):
        super().__init__()
        widths = [4 * channels, 4 * channels, 2 * channels, channels]
        self.stem = nn.Conv2d(latent_channels, widths[0], 3, padding=1)
        self.levels = nn.ModuleList(
            nn.Sequential(Residual(narrow, wide), Residual(wide, wide))
            for narrow, wide in zip([widths[0], *widths], widths, strict=False)
        )
        self.enlarge = nn.ModuleList(nn.Conv2d(wide, wide, 3, padding=1) for wide in widths[:-1])
        self.norm = nn.GroupNorm(min(32, channels), channels)
        self.head = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, z):
        x = self.stem(z)
        for i, level in enumerate(self.levels):
            x = level(x)
            if i < len(self.enlarge):
                x = self.enlarge[i](nn.functional.interpolate(x, scale_factor=2, mode="nearest"))
        return self.head(nn.functional.silu(self.norm(x)))


def get_inputs():
    return [torch.randn(batch_size, latent_channels, height, width)]


def get_init_inputs():
    return [latent_channels, channels]
