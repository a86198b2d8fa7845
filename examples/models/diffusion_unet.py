"""The convolutions of a latent-diffusion U-Net: residual blocks that take the time, three levels, no attention."""

import torch
from torch import nn

batch_size = 8
latent_channels, channels = 4, 320
height = width = 64


class Residual(nn.Module):
    """Two 3x3 layers; between them the embedded time is added to every pixel."""

    def __init__(self, in_channels, out_channels, time_channels):
        super().__init__()
        self.norm1 = nn.GroupNorm(min(32, in_channels), in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_channels, out_channels)
        self.norm2 = nn.GroupNorm(min(32, out_channels), out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x, time):
        y = self.conv1(nn.functional.silu(self.norm1(x)))
        y = y + self.time(nn.functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(nn.functional.silu(self.norm2(y)))


class Model(nn.Module):
    def __init__(self, latent_channels, channels):
        super().__init__()
        widths, time = [channels, 2 * channels, 4 * channels], 4 * channels
        self.stem = nn.Conv2d(latent_channels, channels, 3, padding=1)
        self.down = nn.ModuleList(Residual(*pair, time) for pair in zip([channels, *widths], widths, strict=False))
        self.halve = nn.ModuleList(nn.Conv2d(wide, wide, 3, stride=2, padding=1) for wide in widths[:-1])
        self.middle = Residual(widths[-1], widths[-1], time)
        self.up = nn.ModuleList(
            Residual(deep + wide, wide, time)
            for deep, wide in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=True)
        )
        self.enlarge = nn.ModuleList(nn.Conv2d(wide, wide, 3, padding=1) for wide in widths[:0:-1])
        self.norm = nn.GroupNorm(min(32, channels), channels)
        self.head = nn.Conv2d(channels, latent_channels, 3, padding=1)

    def forward(self, x, time):
        x, skips = self.stem(x), []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else self.halve[i - 1](x), time)
            skips.append(x)
        x = self.middle(x, time)
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], dim=1), time)
            if i < len(self.enlarge):
                x = self.enlarge[i](nn.functional.interpolate(x, scale_factor=2, mode="nearest"))
        return self.head(nn.functional.silu(self.norm(x)))


def get_inputs():
    return [torch.randn(batch_size, latent_channels, height, width), torch.randn(batch_size, 4 * channels)]


def get_init_inputs():
    return [latent_channels, channels]
