"""Models whose images are sharded, beside the same in one process; for tests/spatial_ranks.py."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import haloconv
from haloconv.distributed import shard_spatially
from tests.spatial_problems import Placements, shard


class Everything(nn.Module):
    """All that a sharded model takes, layers of ours and checkpointed ones, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(8)
        self.body = haloconv.Conv2d(8, 8, (3, 2), padding="same", dilation=2, groups=2)
        self.gain = nn.Parameter(torch.randn(8, 1, 1))
        self.excite = nn.Conv2d(8, 8, 1)
        self.embed = nn.Linear(4, 8)
        self.groups = nn.GroupNorm(2, 16)
        self.up = nn.Upsample(scale_factor=3, mode="bilinear")
        self.head = nn.Sequential(nn.Conv2d(16, 4, 3, stride=2), nn.LeakyReLU(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu_()
        x = x + checkpoint(self.body, x, use_reentrant=False) * self.gain
        x = x * torch.sigmoid(self.excite(functional.adaptive_avg_pool2d(x, 1)))
        x = x + self.embed(torch.ones(1, 4, dtype=x.dtype))[:, :, None, None]
        pooled = [functional.max_pool2d(x, 3, 2, 1), functional.avg_pool2d(x, 3, 2, 1)]
        x = self.up(functional.silu(self.groups(torch.cat(pooled, 1))))
        return functional.dropout(self.head(functional.pad(x, (1, 1, 0, 0), mode="circular")), 0.0)


def assert_alike(
    build: Callable[[], nn.Module], shape: tuple[int, ...], mesh: DeviceMesh, placements: Placements
) -> None:
    """A model in training and in inference: what one process makes of it."""
    model = build().double()
    single = copy.deepcopy(model)
    assert shard_spatially(model, mesh) is model and model.state_dict().keys() == single.state_dict().keys()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mine = shard(x, mesh, placements)
    y, expected = model(mine), single(x)
    dy = torch.randn(expected.shape, dtype=torch.float64)
    y.backward(shard(dy, mesh, placements))
    expected.backward(dy)
    assert_close(y.full_tensor(), expected)
    assert isinstance(mine.grad, DTensor) and x.grad is not None
    assert_close(mine.grad.full_tensor(), x.grad)
    for parameter, other in zip(model.parameters(), single.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        assert_close(parameter.grad, other.grad)
    for ours, theirs in zip(model.buffers(), single.buffers(), strict=True):
        assert_close(ours, theirs)
    again = copy.deepcopy(model).eval()
    with torch.no_grad():
        assert_close(again(mine).full_tensor(), single.eval()(x))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Up to rounding in fp64."""
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * max(1.0, theirs.abs().max().item()))


def with_ddp(model: nn.Module, data: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=data.get_group())


def with_fsdp2(model: nn.Module, data: DeviceMesh) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    fully_shard(model[0], mesh=data)
    fully_shard(model, mesh=data)
    return model


def assert_trained_alike(wrap: Callable, data: DeviceMesh, space: DeviceMesh) -> None:
    """Two steps of training: the parameters are those of one process that had the whole batch."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, stride=2)
    single = nn.Sequential(*layers).double()
    model = wrap(shard_spatially(copy.deepcopy(single), space), data)
    x = torch.randn(4, 3, 10, 12, dtype=torch.float64)
    mine = shard(x.chunk(2)[data.get_local_rank()], space, (Shard(3),))
    for each, images, count in ((single, x, 1), (model, mine, 2)):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            (each(images).square().sum() * count).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        assert_close(ours.full_tensor() if hasattr(ours, "full_tensor") else ours, theirs)


class _Calls(nn.Module):
    """A model that calls one function."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class _GivesAll(nn.Module):
    """A sharded model that is given a plain tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.models = [model]  # no child

    def forward(self, x: DTensor) -> torch.Tensor:
        return shard_spatially(self.models[0], x.device_mesh)(x.to_local())


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: _Calls(lambda x: x.softmax(2)),
    "mean": lambda: _Calls(lambda x: x.mean((2, 3))),
    "flip": lambda: _Calls(lambda x: torch.flip(x, (2,))),
    "__getitem__": lambda: _Calls(lambda x: x[..., 1:]),
    "cat": lambda: _Calls(lambda x: torch.cat([x, x], 2)),
    "Tensor.mT": lambda: _Calls(lambda x: x.mT),
    "interpolate": lambda: _Calls(lambda x: functional.interpolate(x, (12, 12))),
    "max_pool2d_with_indices": lambda: nn.MaxPool2d(2, return_indices=True),
    "ceil_mode": lambda: nn.AvgPool2d(3, 2, ceil_mode=True),
    "dropout": lambda: nn.Dropout(),
    "conv_transpose2d": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.ConvTranspose2d(3, 3, 2)).double(),
    "dgrad": lambda: haloconv.ConvTranspose2d(3, 3, 2).double(),
    "layer_norm": lambda: nn.LayerNorm(8).double(),
    "linear": lambda: nn.Linear(8, 8).double(),
    "unfold": lambda: nn.Unfold(3),
    "SyncBatchNorm": lambda: nn.Sequential(nn.SyncBatchNorm(3)),
    "distribute_tensor(x, mesh, [Shard(2)])": lambda: _GivesAll(nn.ReLU()),
    "pixel_shuffle": lambda: _Calls(lambda x: functional.pixel_shuffle(torch.cat([x] * 4, 1), 2)),
}
"""By the name that the refusal has, models that a sharded image cannot go through."""


def refusal(build: Callable[[], nn.Module], mesh: DeviceMesh, placements: Placements) -> str:
    """The sentence that a model ends with."""
    try:
        model = shard_spatially(build(), mesh)
        model(shard(torch.randn(2, 3, 8, 8, dtype=torch.float64), mesh, placements))
    except (NotImplementedError, TypeError) as error:
        return str(error)
    return "nothing was raised"


def fails_on(rank: int) -> nn.Module:
    """A model of two convolutions, between which one rank fails."""

    def between(x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == rank:
            raise KeyError("the data loader's last batch")
        return x

    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), _Calls(between), nn.Conv2d(3, 3, 3, padding=1)).double()
