"""Small kernels gathered by foreach operators, by Inductor on a GPU: the same values, in fewer kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from haloconv import backend as backends
from haloconv import moments
from haloconv.bench.layer import LAYOUTS
from haloconv.choose.choice import Choice
from haloconv.fusion.lowered import foreach

BLOCKS = 4


class Tower(nn.Module):
    """Convolutions with norms in training mode, wide enough that our kernel measures what it stores."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(256, 256, 1, bias=False) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.BatchNorm2d(256) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return x


def tower() -> Tower:
    """One in channels_last."""
    model = Tower().cuda()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous(
            memory_format=LAYOUTS["nhwc"] if parameter.dim() == 4 else LAYOUTS["nchw"]
        )
    return model


def step(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = call(x.detach().requires_grad_())
    y.float().square().mean().backward()
    return y.detach()


Run = Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor]], list[torch.Tensor]]


def both_ways(monkeypatch: pytest.MonkeyPatch, run: Run) -> tuple[list, list[int]]:
    """What ``run`` gives of a compiled tower without and with lists, and how many kernels its second call launches."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("halo_sm90 needs compute capability (9, 0)")
    for module in (backends, moments):
        monkeypatch.setattr(module, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))
    torch.manual_seed(0)
    model = tower()
    found, launches = [], []
    for gather in (lambda graph: 0, foreach.gather):
        monkeypatch.setattr(foreach, "gather", gather)
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        call = torch.compile(own, backend=backends.backend, fullgraph=True)
        run(own, call)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            found.append(run(own, call))
            torch.cuda.synchronize()
        launches.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events()))
    return found, launches


def images() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(8, 256, 28, 28, device="cuda", generator=generator).contiguous(memory_format=LAYOUTS["nhwc"])


def test_many_small_kernels_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four lists in place of three kernels a norm, a counter, and two casts a weight."""

    def trained(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        y = step(call, images())
        return [y, *model.buffers(), *(each.grad for each in model.parameters() if each.grad is not None)]

    found, launches = both_ways(monkeypatch, trained)
    assert launches[1] <= launches[0] - 5 * BLOCKS + 4, launches
    for one, other in zip(*found, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-3)


def test_what_convolutions_add_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation mode: the bias and scale of all norms, instead of a kernel each."""

    def inferred(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            return [call(images())]

    (one, other), launches = both_ways(monkeypatch, inferred)
    assert launches[1] <= launches[0] - BLOCKS + 1, launches
    torch.testing.assert_close(other[0], one[0], rtol=2e-2, atol=2e-3)
