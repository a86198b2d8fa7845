"""Train a U-Net on images of the globe that are divided over processes: circular along longitude, zeros at the poles.

    torchrun --nproc-per-node 2 examples/sharded_unet.py                  # two bands of latitude, without a GPU: gloo
    torchrun --nproc-per-node 4 examples/sharded_unet.py --columns 2      # two bands by two of longitude

Each process has its rows and columns of every image and of all that is computed of it, and all weights. The losses are
printed beside those of one process that has whole images, unless --alone leaves that out.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from haloconv.distributed import exchange_cost, shard_spatially


class Globe(nn.Module):
    """A 3x3 convolution of an image whose left and right border meet, group norm and an activation."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=(1, 0))
        self.norm = nn.GroupNorm(4, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.pad(x, (1, 1, 0, 0), mode="circular")
        return functional.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Three levels, halved by pooling and doubled by interpolation, with skips between."""

    def __init__(self, variables: int, channels: int) -> None:
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(Globe(*pair) for pair in zip([variables, *widths], widths, strict=False))
        self.up = nn.ModuleList(Globe(3 * wide, wide) for wide in widths[-2::-1])
        self.head = nn.Conv2d(channels, variables, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, level in enumerate(self.down):
            x = level(x if i == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        for level, skip in zip(self.up, skips[-2::-1], strict=True):
            x = functional.interpolate(x, skip.shape[-2:], mode="bilinear")
            x = level(torch.cat([skip, x], dim=1))
        return self.head(x)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=1, help="shards along longitude; all others are along latitude")
    parser.add_argument("--image", type=int, nargs=2, default=(32, 64), metavar=("H", "W"), help="multiples of 4")
    parser.add_argument("--variables", type=int, default=5, help="channels of an image")
    parser.add_argument("--channels", type=int, default=8, help="of the first level")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="no process that has whole images beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def train(model: nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int) -> list[float]:
    """The loss of each step; the same whether x and target are sharded or not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - target).square().sum() / target.numel()
        loss.backward()
        optimizer.step()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    owns_group = not dist.is_initialized()
    if owns_group:
        if "RANK" not in os.environ:
            raise SystemExit("sharded_unet.py runs in several processes: torchrun --nproc-per-node 2 sharded_unet.py")
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rows = dist.get_world_size() // options.columns
    shape, placements = (rows,), [Shard(2)]
    if options.columns > 1:
        shape, placements = (rows, options.columns), [Shard(2), Shard(3)]
    mesh = init_device_mesh(options.device, shape)
    torch.manual_seed(0)  # all processes draw the same weights
    model = UNet(options.variables, options.channels).to(options.device)
    single = None if options.alone or dist.get_rank() else copy.deepcopy(model)
    x, target = torch.randn(2, options.batch, options.variables, *options.image, device=options.device)
    mine, mine_target = (distribute_tensor(each, mesh, placements) for each in (x, target))

    shard_spatially(model, mesh)
    losses = train(model, mine, mine_target, options.steps)
    if dist.get_rank() == 0:
        print(f"rank 0 of {dist.get_world_size()} has {list(mine.to_local().shape)} of {list(x.shape)}")
        expected = losses if single is None else train(single, x, target, options.steps)
        for step, (loss, alone) in enumerate(zip(losses, expected, strict=True), 1):
            print(f"step {step}: loss {loss:.5f}" + ("" if single is None else f", {alone:.5f} in one process"))
        print(f"The first layer: {exchange_cost(model.down[0].conv, tuple(x.shape), (rows, options.columns))}")
    if owns_group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # DTensor keeps threads of gloo beyond the process group, on which an interpreter that ends may abort
