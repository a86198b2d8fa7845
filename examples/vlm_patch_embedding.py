"""The patch embedding of a vision-language model as Qwen-VL's: a Conv3d, ours, and the same product as a Linear.

python examples/vlm_patch_embedding.py --patches 4096 --dtype bfloat16      # of an image of 896 x 896 pixels
python examples/vlm_patch_embedding.py --patches 16 --filters 64 --repeat 1 --device cpu
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

import haloconv

COLOURS = 3


class PatchEmbedding(nn.Module):
    """(patches, 3 * T * S * S) numbers, as the image processor hands them over, become (patches, filters)."""

    def __init__(self, filters: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv3d(COLOURS, filters, patch, stride=patch, bias=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        volumes = pixels.view(-1, COLOURS, *self.patch)
        return self.proj(volumes).view(pixels.shape[0], -1)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Embeds patches with and without haloconv, and with a Linear.")
    parser.add_argument("--patches", type=int, default=4096)
    parser.add_argument("--filters", type=int, default=1280)
    parser.add_argument("--frames", type=int, default=2, help="that a patch spans")
    parser.add_argument("--size", type=int, default=14, help="pixels of a patch's side")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=10, help="steps that are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def linear_of(embedding: PatchEmbedding) -> nn.Linear:
    """The same product: a filter's taps are a row of the matrix."""
    weight = embedding.proj.weight
    linear = nn.Linear(weight[0].numel(), weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    linear.weight.data.copy_(weight.detach().flatten(1))
    return linear


def step_of(model: nn.Module, pixels: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Forward and backward: the embeddings, and the gradient of the weight as a matrix."""
    (weight,) = model.parameters()

    def step() -> list[torch.Tensor]:
        y = model(pixels)
        (dw,) = torch.autograd.grad(y.float().pow(2).mean(), weight)
        return [y.detach(), dw.flatten(1)]

    return step


def seconds_of(step: Callable[[], list[torch.Tensor]], repeat: int) -> float:
    step()[1].sum().item()  # compiles, and waits for the GPU
    started = time.perf_counter()
    for _ in range(repeat):
        step()[1].sum().item()
    return (time.perf_counter() - started) / max(1, repeat)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    torch.manual_seed(0)
    patch, dtype = (options.frames, options.size, options.size), getattr(torch, options.dtype)
    theirs = PatchEmbedding(options.filters, patch).to(options.device, dtype)
    ours = copy.deepcopy(theirs)
    report = haloconv.accelerate(ours)
    pixels = torch.randn(options.patches, COLOURS * options.frames * options.size**2, device=options.device).to(dtype)
    models = {"torch.nn.Conv3d": theirs, "haloconv": ours, "torch.nn.Linear": linear_of(theirs)}
    steps = {name: step_of(model, pixels) for name, model in models.items()}
    print(report)
    expected = step_of(linear_of(theirs).double(), pixels.double())()
    for name, step in steps.items():
        errors = [(got.double() - want).norm() / want.norm() for got, want in zip(step(), expected, strict=True)]
        print(f"{name}: embeddings off by {errors[0]:.1e} of their norm, weight gradient by {errors[1]:.1e}")
    if options.device == "cpu":
        print("No times: on a CPU haloconv's layer is PyTorch's.")
    else:
        for name, step in steps.items():
            print(f"{1e3 * seconds_of(step, options.repeat):.2f} ms per step with {name}")


if __name__ == "__main__":
    main()
