"""What the tests of torch.compile(backend="haloconv") share: small models, and a device that has our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional
from torch.overrides import _pop_mode_temporarily

from haloconv import backend as backends
from haloconv.emulator import EmulatedDevice, emulated_device


@contextmanager
def emulated() -> Iterator[EmulatedDevice]:
    """Kernels run on the emulator, and torch.compile need not trace the mode in which it sees tensors."""
    with emulated_device() as device, _pop_mode_temporarily():
        yield device


def through_aot(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """The backend with PyTorch's operators in Inductor's place, which is quicker to compile."""
    backends.replace_convolutions(graph)
    return lookup_backend("aot_eager")(graph, inputs)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = shape or (2, 4, 8, 10)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


class Residual(nn.Module):
    """A basic block of ResNet with its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, 2, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.project = nn.Conv2d(4, 8, 1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(y + self.norms[2](self.project(x)))


class Separable(nn.Module):
    """A depthwise and a pointwise convolution, as in MobileNet, and a grouped one called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(4, 4, 3, padding="same", groups=4), nn.Conv2d(4, 6, 1)
        self.weight = nn.Parameter(torch.randn(6, 3, 1, 3) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.silu(self.pointwise(self.depthwise(x)))
        return functional.conv2d(y, self.weight, stride=(1, 2), padding=(0, 1), groups=2).sigmoid()


class Decoder(nn.Module):
    """What U-Nets have: a transposed convolution, a skip, group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 2, 2)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3, padding=1, padding_mode="reflect")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(torch.cat([x, self.up(functional.gelu(self.down(x)))], 1)))


class Upsampler(nn.Module):
    """What vocoders have: a transposed 1-D convolution and a dilated one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dilated = nn.ConvTranspose1d(4, 6, 4, 2, 1), nn.Conv1d(6, 6, 3, dilation=2, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dilated(functional.leaky_relu(self.up(x), 0.1)).tanh()
