"""One rank of a U-Net in training on images divided over processes, timed. Run as a module, in a process of its own.

Reads an order from standard input and writes what it measured to standard output, as its last line. Without shards the
image is a plain tensor, and the layers are those of haloconv.accelerate: nothing of torch.distributed takes part.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from haloconv.accelerate import accelerate
from haloconv.calls import noting_calls
from haloconv.distributed import ExchangeCost, exchange_cost, shard_spatially
from haloconv.tune.timing import synchronize

Tensor = torch.Tensor
Step = Callable[[], None]

CHECKED_ROWS, CHECKED_COLUMNS, CHECKED_CHANNELS = 8, 16, 8
"""Extents of the small image whose loss and gradients are held against one process's; the rows are those of a rank."""


class Globe(nn.Module):
    """A 3x3 convolution of an image whose left and right border meet, group norm and an activation."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=(1, 0))
        self.norm = nn.GroupNorm(4, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(x, (1, 1, 0, 0), mode="circular")
        return functional.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Three levels, halved by pooling and doubled by interpolation: that of examples/sharded_unet.py."""

    def __init__(self, variables: int, channels: int) -> None:
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(Globe(*pair) for pair in zip([variables, *widths], widths, strict=False))
        self.up = nn.ModuleList(Globe(3 * wide, wide) for wide in widths[-2::-1])
        self.head = nn.Conv2d(channels, variables, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, level in enumerate(self.down):
            x = level(x if i == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        for level, skip in zip(self.up, skips[-2::-1], strict=True):
            x = functional.interpolate(x, skip.shape[-2:], mode="bilinear")
            x = level(torch.cat([skip, x], dim=1))
        y: torch.Tensor = self.head(x)
        return y


def timed_rank(order: dict[str, Any]) -> dict[str, Any]:
    """Check and time this rank's part of the training step.

    The order has ``rank``, ``ranks``, ``meeting`` (a file that is not there yet), ``device`` (of this rank), ``tf32``,
    ``is_sharded``, ``batch``, ``variables``, ``channels``, ``rows`` (of each rank), ``columns``, ``warm_up``,
    ``steps`` and ``in_a_row``. Gives ``ms`` of each step that is timed alone; ``in_a_row_ms`` of a step of each group
    that follow each other; ``peak_bytes`` of PyTorch's allocator, None on a CPU; ``error``: how far
    gradients of a small image are from those of one process, relative to their norm; and, of the model of the exchange,
    ``messages`` and ``halo_bytes`` that a rank receives in a forward pass, and ``weight_bytes`` that are summed in a
    backward pass.
    """
    device, ranks = torch.device(order["device"]), order["ranks"]
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = order["tf32"]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = None
    if order["is_sharded"]:
        method, backend = f"file://{order['meeting']}", "nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=120)
        dist.init_process_group(backend, init_method=method, rank=order["rank"], world_size=ranks, timeout=limit)
        mesh = init_device_mesh(device.type, (ranks,))
    error = gradient_error(order["variables"], device, mesh)
    step = _step_of(order, device, mesh)
    for _ in range(order["warm_up"]):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ms = [_ms(step, device, 1) for _ in range(order["steps"])]
    in_a_row_ms = [_ms(step, device, order["in_a_row"]) for _ in range(-(-order["steps"] // order["in_a_row"]))]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    costs = _exchanges(order)
    modelled = {name: sum(getattr(each, name) for each in costs) for name in ("messages", "halo_bytes", "weight_bytes")}
    return {"ms": ms, "in_a_row_ms": in_a_row_ms, "peak_bytes": peak, "error": error, **modelled}


def _step_of(order: dict[str, Any], device: torch.device, mesh: DeviceMesh | None) -> Step:
    """A training step on images of which this rank draws its rows by itself."""
    torch.manual_seed(0)  # all ranks draw the same weights
    model = _served(UNet(order["variables"], order["channels"]).to(device), mesh)
    torch.manual_seed(1 + order["rank"])
    shape = (order["batch"], order["variables"], order["rows"], order["columns"])
    x, target = (_image(torch.randn(shape, device=device), mesh) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model, x, target).backward()
        optimizer.step()

    return step


def _loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    loss: torch.Tensor = (model(x) - target).square().sum() / target.numel()
    return loss


def _served(model: UNet, mesh: DeviceMesh | None) -> UNet:
    """The model on our kernels: sharded over the mesh, or of whole images without one."""
    if mesh is not None:
        return shard_spatially(model, mesh)
    accelerate(model)
    return model


def _image(rows: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The image of which each rank has these rows."""
    return rows if mesh is None else DTensor.from_local(rows, mesh, [Shard(2)], run_check=False)


def gradient_error(variables: int, device: torch.device, mesh: DeviceMesh | None) -> float:
    """The norm of what gradients of weights differ by from PyTorch's of a whole small image, over the norm of these.

    In full fp32, on the kernels for that.
    """
    torch.manual_seed(2)
    plain = UNet(variables, CHECKED_CHANNELS).to(device)
    served = _served(copy.deepcopy(plain), mesh)
    ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
    whole = torch.randn(2, 1, variables, CHECKED_ROWS * ranks, CHECKED_COLUMNS, device=device)
    mine = whole.narrow(3, CHECKED_ROWS * rank, CHECKED_ROWS)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        _loss(plain, *whole).backward()
        _loss(served, *(_image(each.contiguous(), mesh) for each in mine)).backward()
    wanted, got = (
        torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])
        for model in (plain, served)
    )
    return float((got - wanted).norm() / wanted.norm())


def _exchanges(order: dict[str, Any]) -> list[ExchangeCost]:
    """What each convolution of the model exchanges, by the cost model, in the order of the calls."""
    found: list[ExchangeCost] = []

    def note(_: str, layer: nn.Conv2d, x: Tensor, __: Tensor) -> None:
        n, c, h, w = x.shape
        found.append(exchange_cost(layer, (n, c, h, w), (order["ranks"], 1)))

    with torch.device("meta"):
        model = UNet(order["variables"], order["channels"])
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)}
    with torch.device("meta"), noting_calls(layers, note):
        model(torch.empty(order["batch"], order["variables"], order["rows"] * order["ranks"], order["columns"]))
    return found


def _ms(step: Step, device: torch.device, count: int) -> float:
    """Wall ms of a step among as many, from an idle device to an idle device."""
    begin = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3 / count


def main() -> None:
    """The order's rank. It ends at once, whatever happens; an error's sentence is the last line on its error stream."""
    code = 0
    try:
        print(json.dumps(timed_rank(json.load(sys.stdin))), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)  # DTensor keeps threads of gloo, and NCCL has threads, on which an interpreter that ends may abort


if __name__ == "__main__":
    main()
