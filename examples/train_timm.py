"""Train a model of timm on random images, on PyTorch's convolutions and on ours: losses side by side, time per step.

python examples/train_timm.py --model convnext_tiny --batch 64 --image 224 --amp
python examples/train_timm.py --model tf_efficientnet_b0 --batch 2 --image 64 --steps 2 --device cpu
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
    import timm
except ImportError as error:
    sys.exit(f"train_timm.py needs timm: pip install timm ({error})")

CLASSES = 10


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a model of timm with and without haloconv.")
    parser.add_argument("--model", default="convnext_tiny", help="a name that timm.create_model knows")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("--image", type=int, default=224, help="rows and columns of an image")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true", help="under autocast to bfloat16")
    parser.add_argument("--tune", action="store_true", help="measure which kernels are fastest first, and keep it")
    return parser.parse_args(arguments)


def batches(options: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same random images and labels for both models."""
    shape = (options.batch, 3, options.image, options.image)
    images = [torch.randn(shape, device=options.device) for _ in range(options.steps)]
    labels = [torch.randint(CLASSES, (options.batch,), device=options.device) for _ in range(options.steps)]
    return list(zip([each.to(memory_format=torch.channels_last) for each in images], labels, strict=True))


def train(
    model: torch.nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], options: argparse.Namespace
) -> tuple[list[float], float]:
    """The loss of each step, and seconds per step without the first, which compiles."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses, started = [], time.perf_counter()
    for step, (images, labels) in enumerate(data):
        with torch.autocast(options.device, torch.bfloat16, enabled=options.amp):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        if step == 0:
            started = time.perf_counter()
    return losses, (time.perf_counter() - started) / max(1, len(data) - 1)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    torch.manual_seed(0)
    theirs = timm.create_model(options.model, num_classes=CLASSES).to(options.device, memory_format=torch.channels_last)
    ours = copy.deepcopy(theirs)
    report = haloconv.accelerate(ours)
    data = batches(options)
    if options.tune:
        with torch.autocast(options.device, torch.bfloat16, enabled=options.amp):
            haloconv.tune(ours, data[0][0])
    results = []
    for model in (theirs, ours):
        torch.manual_seed(1)  # dropout
        results.append(train(model, data, options))
    (their_losses, their_time), (our_losses, our_time) = results
    print(report)
    for step, (their_loss, our_loss) in enumerate(zip(their_losses, our_losses, strict=True)):
        print(f"step {step}: loss {their_loss:.4f} with PyTorch, {our_loss:.4f} with haloconv")
    if options.device == "cpu":
        print("No times: our kernels run on GPUs, and this was PyTorch's convolution twice.")
    elif options.steps > 1:
        print(f"{1e3 * their_time:.1f} ms per step with PyTorch, {1e3 * our_time:.1f} ms with haloconv")


if __name__ == "__main__":
    main()
