"""The ``halo_sm80`` family: few channels per group on tensor cores, fprop and dgrad from compute capability 8.0 on.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. NCHW and channels_last, in and out,
are native.
"""

from __future__ import annotations

import torch

from haloconv import support
from haloconv.device import device_facts
from haloconv.families.base import BoundCall, Config
from haloconv.families.halo_sm80 import conv, sources
from haloconv.jit import KernelSource
from haloconv.problem import Direction, Problem, Request, dense_request


class HaloSm80Family:
    """Stems and grouped layers of few channels, forward and input gradient."""

    name = "halo_sm80"
    directions: tuple[Direction, ...] = ("fprop", "dgrad")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    tensor_cores = True
    has_epilogue = True
    has_padding_modes = False
    depthwise = False
    capability, newer = (8, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device) or support.why_no_tensor_cores(problem)
        if reason is not None:
            return reason
        found = device_facts(device.index).capability
        reason = support.why_not_capability(found, self.capability, self.newer)
        if reason is not None:
            return reason
        return conv.why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        return conv.configs(request)

    def bind(self, request: Request, config: Config) -> BoundCall:
        return conv.bind(request, config)

    def sources(self) -> list[KernelSource]:
        return sources.sources()
