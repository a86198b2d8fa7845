"""The ``depthwise_toeplitz`` family: depthwise layers with large filters on tensor cores.

One input channel per group, any number of filters per channel, four-sided padding; TF32, three
products of it for one of fp32, fp16 and bf16, with fp32 sums.
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
from haloconv.precision import Precision
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, dense_request

_KERNELS: dict[str, Kernel] = {twin.KERNEL: twin for twin in (toeplitz, wgrad)}
_LEAST_SMEM = 99 << 10  # of a block, on every device of the family
_PRECISIONS: dict[str, tuple[torch.dtype, Precision]] = {
    "fp16": (torch.float16, "ieee"),
    "bf16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "tf32x3": (torch.float32, "tf32x3"),
}
_ANY_DEVICE = torch.device("cpu")  # of sources: they do not depend on it


class DepthwiseToeplitzFamily:
    """Bands of filters on tensor cores: depthwise layers without stride and dilation."""

    name = "depthwise_toeplitz"
    directions: tuple[Direction, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    tensor_cores = True
    has_epilogue = False
    has_padding_modes = False
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
    layers: tuple[tuple[str, Layout, int, int, tuple[Direction, ...]], ...] = (
        ("fp16", "nchw", 56, 31, DIRECTIONS),
        ("tf32", "nchw", 56, 31, DIRECTIONS),
        ("bf16", "nchw", 28, 29, DIRECTIONS[::2]),
        ("fp16", "nchw", 14, 27, DIRECTIONS[1:]),
        ("bf16", "nchw", 7, 13, DIRECTIONS),
        ("tf32", "nhwc", 28, 13, DIRECTIONS),
        ("fp16", "nhwc", 112, 21, DIRECTIONS[::2]),
        ("tf32", "nchw", 112, 31, DIRECTIONS[1:]),
        ("tf32x3", "nchw", 56, 31, DIRECTIONS),
        ("tf32x3", "nhwc", 14, 27, DIRECTIONS),
        ("tf32x3", "nchw", 112, 31, DIRECTIONS[1:]),
        ("tf32x3", "nchw", 7, 13, DIRECTIONS[::2]),
    )
    for label, order, extent, taps, directions in layers:
        dtype, precision = _PRECISIONS[label]
        for direction in directions:
            yield Problem(
                direction, n=8, c=32, h=extent, w=extent, k=32, r=taps, s=taps, padding=(taps // 2,) * 4, groups=32,
                bias=direction == "fprop", dtype=dtype, layout=order, precision=precision,
            )  # fmt: skip
