"""The ``depthwise_toeplitz`` family: depthwise layers with large filters on tensor cores.

One input channel per group, any number of filters per channel, four-sided padding; TF32, fp16 and bf16 with fp32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from haloconv import support
from haloconv.device import device_facts
from haloconv.families.base import BoundCall, Config, Kernel
from haloconv.families.depthwise_toeplitz import toeplitz, wgrad
from haloconv.jit import KernelSource
from haloconv.layout import Layout
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, dense_request

_KERNELS: dict[str, Kernel] = {twin.KERNEL: twin for twin in (toeplitz, wgrad)}
_LEAST_SMEM = 99 << 10  # of a block, on every device of the family
_ANY_DEVICE = torch.device("cpu")  # of sources: they do not depend on it


class DepthwiseToeplitzFamily:
    """Bands of filters on tensor cores: depthwise layers without stride and dilation."""

    name = "depthwise_toeplitz"
    directions: tuple[Direction, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    tensor_cores = True
    has_epilogue = False
    depthwise = True
    capability, newer = (8, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        found = device_facts(device.index).capability
        reason = support.why_not_capability(found, self.capability, self.newer)
        return reason or _twin(problem).why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        found: list[Config] = _twin(request.problem).configs(request)
        return found

    def bind(self, request: Request, config: Config) -> BoundCall:
        return _KERNELS[config.kernel].bind(request, config)

    def sources(self) -> list[KernelSource]:
        """The best tiling of a few layers that differ in what warps hold and in how planes are copied."""
        found = (_best_source(dense_request(problem, _ANY_DEVICE)) for problem in _representative_problems())
        return list({source.digest: source for source in found}.values())


def _twin(problem: Problem) -> ModuleType:
    """The module of the kernel of the problem's direction."""
    return wgrad if problem.direction == "wgrad" else toeplitz


def _best_source(request: Request) -> KernelSource:
    twin = _twin(request.problem)
    source: KernelSource = twin.source(request, twin.tilings(request.problem, _LEAST_SMEM)[0])
    return source


def _representative_problems() -> Iterator[Problem]:
    layers: tuple[tuple[torch.dtype, Layout, int, int, tuple[Direction, ...]], ...] = (
        (torch.float16, "nchw", 56, 31, DIRECTIONS),
        (torch.float32, "nchw", 56, 31, DIRECTIONS),
        (torch.bfloat16, "nchw", 28, 29, DIRECTIONS[::2]),
        (torch.float16, "nchw", 14, 27, DIRECTIONS[1:]),
        (torch.bfloat16, "nchw", 7, 13, DIRECTIONS),
        (torch.float32, "nhwc", 28, 13, DIRECTIONS),
        (torch.float16, "nhwc", 112, 21, DIRECTIONS[::2]),
        (torch.float32, "nchw", 112, 31, DIRECTIONS[1:]),
    )
    for dtype, order, extent, taps, directions in layers:
        for direction in directions:
            yield Problem(
                direction, n=8, c=32, h=extent, w=extent, k=32, r=taps, s=taps, padding=(taps // 2,) * 4, groups=32,
                bias=direction == "fprop", dtype=dtype, layout=order,
                precision="tf32" if dtype == torch.float32 else "ieee",
            )  # fmt: skip
