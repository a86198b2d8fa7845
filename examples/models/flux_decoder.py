"""A decoder of the size of FLUX's: 16 latent channels, attention first, three residual blocks a level, 1024 x 1024."""

import torch
from torch import nn

batch_size = 1
latent_channels, channels = 16, 128
height = width = 128


def norm(channels):
    return nn.GroupNorm(min(32, channels), channels, eps=1e-6)


class Residual(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.layers = nn.Sequential(
            norm(in_channels),
            nn.SiLU(),
            nn.Conv2d(in_channels, out_channels, 3, padding=1),
            norm(out_channels),
            nn.SiLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )
        self.shortcut = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        return self.shortcut(x) + self.layers(x)


class Attention(nn.Module):
    """Every pixel with every other, one head; queries, keys and values are 1x1 layers."""

    def __init__(self, channels):
        super().__init__()
        self.norm = norm(channels)
        self.inner = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        q, k, v = self.inner(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Enlarge(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(nn.functional.interpolate(x, scale_factor=2, mode="nearest"))


class Model(nn.Module):
    def __init__(self, latent_channels, channels):
        super().__init__()
        widths = [4 * channels, 4 * channels, 2 * channels, channels]
        layers = [nn.Conv2d(latent_channels, widths[0], 3, padding=1)]
        layers += [Residual(widths[0], widths[0]), Attention(widths[0]), Residual(widths[0], widths[0])]
        for level, (before, wide) in enumerate(zip([widths[0], *widths], widths, strict=False)):
            layers += [Enlarge(before)] if level else []
            layers += [Residual(before, wide), Residual(wide, wide), Residual(wide, wide)]
        layers += [norm(channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, z):
        return self.layers(z)


def get_inputs():
    return [torch.randn(batch_size, latent_channels, height, width)]


def get_init_inputs():
    return [latent_channels, channels]
