"""Decode latents with diffusers' AutoencoderKL and random weights, on PyTorch's convolutions and on ours.

python examples/vae_diffusers.py --latent 64 --dtype float16                 # a decoder of Stable Diffusion's size
python examples/vae_diffusers.py --latent 8 --channels 8 16 --device cpu
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence

import torch

import haloconv

try:
    from diffusers import AutoencoderKL
except ImportError as error:
    sys.exit(f"vae_diffusers.py needs diffusers: pip install diffusers ({error})")

LATENT_CHANNELS = 4


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decodes latents with and without haloconv.")
    parser.add_argument("--latent", type=int, default=64, help="rows and columns of the latent image")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--channels", type=int, nargs="+", default=[128, 256, 512, 512], help="of each level")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=10, help="decodes that are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tune", action="store_true", help="measure which kernels are fastest first, and keep it")
    return parser.parse_args(arguments)


def make_vae(options: argparse.Namespace) -> torch.nn.Module:
    """The autoencoder with random weights; only its decoder is used."""
    levels = len(options.channels)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(options.channels),
        layers_per_block=2,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=min(32, *options.channels),
    )
    return vae.eval().to(options.device, getattr(torch, options.dtype)).to(memory_format=torch.channels_last)


def decode(vae: torch.nn.Module, latents: torch.Tensor, repeat: int) -> tuple[torch.Tensor, float]:
    """The images, and seconds per decode after the first, which compiles."""
    images = vae.decode(latents).sample
    images.sum().item()  # waits for the GPU
    started = time.perf_counter()
    for _ in range(repeat):
        vae.decode(latents).sample.sum().item()
    return images, (time.perf_counter() - started) / max(1, repeat)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    torch.manual_seed(0)
    theirs = make_vae(options)
    ours = copy.deepcopy(theirs)
    report = haloconv.accelerate(ours.decoder)
    shape = (options.batch, LATENT_CHANNELS, options.latent, options.latent)
    latents = torch.randn(shape, device=options.device, dtype=getattr(torch, options.dtype))
    latents = latents.to(memory_format=torch.channels_last)
    with torch.inference_mode():
        if options.tune:
            haloconv.tune(ours.decoder, latents, directions=("fprop",))
        (expected, their_time), (images, our_time) = (decode(vae, latents, options.repeat) for vae in (theirs, ours))
    print(report)
    difference = (images.float() - expected.float()).norm() / expected.float().norm()
    print(f"{tuple(images.shape)} images; haloconv's differ from PyTorch's by {difference:.1e} of their norm")
    if options.device == "cpu":
        print("No times: our kernels run on GPUs, and this was PyTorch's convolution twice.")
    else:
        print(f"{1e3 * their_time:.1f} ms per decode with PyTorch, {1e3 * our_time:.1f} ms with haloconv")


if __name__ == "__main__":
    main()
