"""Scenarios of several processes, each a function that every rank runs after the process group is there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import haloconv
from haloconv.bench.networks.swapped import in_memory_format
from tests.usages import Place, all_ours


def net(on: Place, memory_format: torch.memory_format) -> nn.Sequential:
    """A pointwise and a depthwise convolution: filters with dimensions of size 1, whose strides are a choice."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    return in_memory_format(nn.Sequential(*layers).to(on.device), memory_format)


def images(on: Place, memory_format: torch.memory_format) -> torch.Tensor:
    """The batch of all ranks: two images for each."""
    return on.image(n=2 * dist.get_world_size()).contiguous(memory_format=memory_format)


def own_part(x: torch.Tensor) -> torch.Tensor:
    return x[2 * dist.get_rank() : 2 * dist.get_rank() + 2]


def train(model: nn.Module, x: torch.Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def assert_trained_alike(model: nn.Module, single: nn.Module) -> None:
    """The parameters are those of one process that had the whole batch."""
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(whole, theirs, rtol=1e-4, atol=1e-5)


def ddp(on: Place, memory_format: torch.memory_format = torch.contiguous_format) -> None:
    """Accelerated before or after it is wrapped; trained on after restore."""
    x = images(on, memory_format)
    for wrapped_first in (False, True):
        model, single = net(on, memory_format), net(on, memory_format)
        ranks = DistributedDataParallel(model) if wrapped_first else None
        on.accelerate(ranks or model)
        ranks = ranks or DistributedDataParallel(model, gradient_as_bucket_view=True)
        assert all_ours(ranks)
        train(ranks, own_part(x))
        for parameter in model.parameters():
            assert parameter.grad.stride() == parameter.stride()
        train(single, x)
        assert_trained_alike(model, single)
        assert len(haloconv.restore(ranks)) == 2
        train(ranks, own_part(x), 1)
        train(single, x, 1)
        assert_trained_alike(model, single)


def ddp_channels_last(on: Place) -> None:
    """The same where filters and their gradients are stored as channels_last, pointwise and depthwise ones, too."""
    ddp(on, torch.channels_last)


def fsdp2(on: Place) -> None:
    """Accelerated before or after layers and the whole are sharded; restored while they are."""
    for sharded_first in (False, True):
        model, single = (net(on, torch.contiguous_format) for _ in range(2))
        x = images(on, torch.contiguous_format)
        mesh = dist.device_mesh.init_device_mesh(on.device, (dist.get_world_size(),))
        if not sharded_first:
            on.accelerate(model)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if sharded_first:
            report = on.accelerate(model)
            assert len(report) == 2 and not report.left
        assert all_ours(model) and type(model[0]).__name__ == "FSDPConv2d"
        assert isinstance(model[0], torch.distributed.fsdp.FSDPModule)
        train(model, own_part(x))
        train(single, x)
        assert_trained_alike(model, single)
        assert haloconv.restore(model) == ["0", "2"]
        assert isinstance(model[0], torch.distributed.fsdp.FSDPModule) and not isinstance(model[0], haloconv.Conv2d)
        train(model, own_part(x), 1)
        train(single, x, 1)
        assert_trained_alike(model, single)


def plain_ddp_channels_last(on: Place) -> None:
    """No layer of ours: what PyTorch's own gradients make of DDP."""
    x = images(on, torch.channels_last)
    train(DistributedDataParallel(net(on, torch.channels_last)), own_part(x))


class _OtherStrides(torch.autograd.Function):
    """Passes a pointwise filter on; its gradient is stored like one that is not channels_last."""

    @staticmethod
    def forward(ctx: object, w: torch.Tensor) -> torch.Tensor:
        return w.view_as(w)

    @staticmethod
    def backward(ctx: object, dw: torch.Tensor) -> torch.Tensor:
        return dw.as_strided(dw.shape, (dw.shape[1], 1, 1, 1))


class _Wrong(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, _OtherStrides.apply(self.weight), self.bias)


def other_strides(on: Place) -> None:
    """What DDP warns of: a gradient whose strides are not its parameter's."""
    model = in_memory_format(_Wrong(3, 8, 1).to(on.device), torch.channels_last)
    train(DistributedDataParallel(model), own_part(images(on, torch.channels_last)))
