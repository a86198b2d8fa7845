"""The ``halo_sm80_f64`` family: convolution in double precision on tensor cores, from compute capability 8.0 on.

Products and sums are fp64. Any stride, dilation, four-sided padding and storage, in NCHW and channels_last; groups of
at least 8 channels.
"""

from __future__ import annotations

import torch

from haloconv import support
from haloconv.device import device_facts
from haloconv.families.base import BoundCall, Config, Kernel
from haloconv.families.halo_sm80_f64 import conv, sources, wgrad
from haloconv.jit import KernelSource
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, dense_request

_TWINS: dict[Direction, Kernel] = {"fprop": conv, "dgrad": conv, "wgrad": wgrad}


class HaloSm80F64Family:
    """Dense layers in fp64, forward and both gradients."""

    name = "halo_sm80_f64"
    directions: tuple[Direction, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float64,)
    tensor_cores = False  # of fp32 it multiplies nothing
    has_epilogue = False
    has_padding_modes = False
    depthwise = False
    capability, newer = (8, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        if problem.dtype != torch.float64:
            return "halo_sm80_f64 takes torch.float64 only"
        found = device_facts(device.index).capability
        reason = support.why_not_capability(found, self.capability, self.newer)
        if reason is not None:
            return reason
        return _TWINS[problem.direction].why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        return _TWINS[request.problem.direction].configs(request)

    def bind(self, request: Request, config: Config) -> BoundCall:
        return _TWINS[request.problem.direction].bind(request, config)

    def sources(self) -> list[KernelSource]:
        return sources.sources()
