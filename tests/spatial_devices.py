"""Scenarios of haloconv.distributed on a row of devices of one kind: GPUs through NCCL, the emulator, or CPUs."""

from __future__ import annotations

from functools import partial
from random import Random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from haloconv import distributed
from haloconv.distributed import exchange
from tests.spatial_problems import COLUMNS, ROWS, differences, draw, integers, shard
from tests.spatial_ranks import spend
from tests.usages import Place


def _mesh(on: Place) -> DeviceMesh:
    return init_device_mesh("cuda" if on.device == "cuda" else "cpu", (dist.get_world_size(),))


def problems(on: Place) -> None:
    """Random problems on rows or columns of all devices; every fifth has gradients of gradients.

    All sums are integers, exact in any order, and so is every result. On a family of ours, which compiles kernels for
    each filter, there are fewer. All are tried; what is wrong of any is told at the end.
    """
    random, mesh = Random(1), _mesh(on)
    wrong: list[str] = []
    for number in range(60 if on.family == "auto" else 16):
        case, placements = draw(random), (ROWS if number % 2 else COLUMNS,)
        about = f"problem {number}, sharded as {placements[0]}, {case}"
        try:
            found = differences(case, mesh, placements, number % 5 == 0, on)
        except Exception as error:
            raise AssertionError(f"{about} on {_where(on)}: {type(error).__name__}: {error}") from error
        wrong += [f"{about}: {told}" for told in found]
    assert not wrong, f"{len(wrong)} results on {_where(on)} are wrong, the first of them: " + "\n".join(wrong[:12])


def branches_twice(on: Place) -> None:
    """Second gradients of layers side by side: in one thread all ranks take them in one order, also on GPUs.

    In two, as GPUs have it else, rank 1 would take them in another, as spatial_ranks.other_orders shows.
    """
    torch.manual_seed(0)
    x, weights, mesh, found = integers(1, 2, 8, 6), [integers(2, 2, 3, 3) for _ in range(2)], _mesh(on), []
    ours = partial(distributed.conv2d, family=on.family, strict=on.strict)
    placed = [each.detach().to(mesh.device_type).requires_grad_() for each in (x, *weights)]
    spend(1000 if dist.get_rank() == 1 else 0)
    for function, image, given in (
        (ours, shard(placed[0], mesh, (ROWS,)), placed[1:]),
        (torch.nn.functional.conv2d, x, weights),
    ):
        with torch.autograd.set_multithreading_enabled(False):
            one, other = (function(image, w, padding=1) for w in given)
            y = one.pow(2) + other.pow(2)
            (first,) = torch.autograd.grad(y, image, torch.ones_like(y), create_graph=True)
            found.append([each.cpu() for each in torch.autograd.grad(first, given, torch.ones_like(first))])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, msg=lambda told: f"on {_where(on)}: {told}")


def _where(on: Place) -> str:
    """This rank, its streams and its software."""
    said = f"rank {dist.get_rank()} of {dist.get_world_size()}, {on}, torch {torch.__version__}"
    if on.device != "cuda":
        return said
    here = torch.cuda.current_stream()
    halos, nccl = exchange.stream_of(here.device), ".".join(map(str, torch.cuda.nccl.version()))
    name = torch.cuda.get_device_name(here.device)
    return (
        f"{said}, {here.device} ({name}), NCCL {nccl}, cuDNN {torch.backends.cudnn.version()}, "
        f"stream {here.cuda_stream:#x}, halos on {halos.cuda_stream:#x}"
    )
