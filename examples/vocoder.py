"""Speech from a mel spectrogram with a generator as HiFi-GAN's, random weights, on PyTorch's convolutions and on ours.

python examples/vocoder.py --frames 344 --dtype float16 --tune               # HiFi-GAN's size, 4 seconds of sound
python examples/vocoder.py --channels 32 --frames 8 --repeat 1 --device cpu
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import haloconv

MELS = 80
RATES = ((16, 8), (16, 8), (4, 2), (4, 2))  # taps and stride of each upsampling layer: 256 samples a frame
KERNELS, DILATIONS = (3, 7, 11), (1, 3, 5)


class ResidualBlock(nn.Module):
    """Dilated layers of one filter's length, each with a plain one behind it."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()

        def layer(dilation: int) -> nn.Module:
            padding = dilation * (taps - 1) // 2
            return weight_norm(nn.Conv1d(channels, channels, taps, padding=padding, dilation=dilation))

        self.dilated = nn.ModuleList(layer(dilation) for dilation in DILATIONS)
        self.plain = nn.ModuleList(layer(1) for _ in DILATIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            x = x + plain(nn.functional.leaky_relu(dilated(nn.functional.leaky_relu(x, 0.1)), 0.1))
        return x


class Generator(nn.Module):
    """(N, 80, frames) becomes (N, 1, 256 * frames)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels >> level for level in range(len(RATES) + 1)]
        self.first = weight_norm(nn.Conv1d(MELS, channels, 7, padding=3))
        self.up = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(wide, narrow, taps, stride=rate, padding=(taps - rate) // 2))
            for wide, narrow, (taps, rate) in zip(widths, widths[1:], RATES, strict=False)
        )
        self.blocks = nn.ModuleList(nn.ModuleList(ResidualBlock(each, taps) for taps in KERNELS) for each in widths[1:])
        self.last = weight_norm(nn.Conv1d(widths[-1], 1, 7, padding=3))

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        x = self.first(mels)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            x = up(nn.functional.leaky_relu(x, 0.1))
            x = sum(block(x) for block in blocks) / len(KERNELS)
        return torch.tanh(self.last(nn.functional.leaky_relu(x)))


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes sound with and without haloconv.")
    parser.add_argument("--channels", type=int, default=512, help="of the first layer; each level has half as many")
    parser.add_argument("--frames", type=int, default=344, help="of the spectrogram, 256 samples each")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=10, help="calls that are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tune", action="store_true", help="measure which kernels are fastest first, and keep it")
    return parser.parse_args(arguments)


def speak(generator: nn.Module, mels: torch.Tensor, repeat: int) -> tuple[torch.Tensor, float]:
    """The sound, and seconds per call after the first, which compiles."""
    sound = generator(mels)
    sound.sum().item()  # waits for the GPU
    started = time.perf_counter()
    for _ in range(repeat):
        generator(mels).sum().item()
    return sound, (time.perf_counter() - started) / max(1, repeat)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    torch.manual_seed(0)
    theirs = Generator(options.channels).eval().to(options.device, getattr(torch, options.dtype))
    ours = copy.deepcopy(theirs)
    report = haloconv.accelerate(ours)
    mels = torch.randn(options.batch, MELS, options.frames, device=options.device, dtype=getattr(torch, options.dtype))
    with torch.inference_mode():
        if options.tune:
            haloconv.tune(ours, mels, directions=("fprop",))
        (expected, their_time), (sound, our_time) = (speak(each, mels, options.repeat) for each in (theirs, ours))
    print(report.summary)
    difference = (sound.float() - expected.float()).norm() / expected.float().norm()
    print(f"{tuple(sound.shape)} samples; haloconv's differ from PyTorch's by {difference:.1e} of their norm")
    if options.device == "cpu":
        print("No times: our kernels run on GPUs, and this was PyTorch's convolution twice.")
    else:
        print(f"{1e3 * their_time:.1f} ms per call with PyTorch, {1e3 * our_time:.1f} ms with haloconv")


if __name__ == "__main__":
    main()
