"""The ``halo_sm80_wgrad`` family: weight gradients of few channels per group on tensor cores, from 8.0 on.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. Any stride, dilation, four-sided
padding, groups and storage, in NCHW and channels_last.
"""

from __future__ import annotations

import torch

from haloconv import support
from haloconv.device import device_facts
from haloconv.families.base import BoundCall, Config
from haloconv.families.halo_sm80_wgrad import sources, wgrad
from haloconv.jit import KernelSource
from haloconv.problem import Direction, Problem, Request, dense_request


class HaloSm80WgradFamily:
    """The weight gradient, written for layers of few channels per group; right for every layer whose tiles fit."""

    name = "halo_sm80_wgrad"
    directions: tuple[Direction, ...] = ("wgrad",)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    tensor_cores = True
    has_epilogue = False
    has_padding_modes = False
    depthwise = False
    capability, newer = (8, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        if problem.direction != "wgrad":
            return "halo_sm80_wgrad computes weight gradients only"
        reason = support.why_no_tensor_core_products(problem)
        if reason is not None:
            return reason
        found = device_facts(device.index).capability
        reason = support.why_not_capability(found, self.capability, self.newer)
        if reason is not None:
            return reason
        return wgrad.why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        return wgrad.configs(request)

    def bind(self, request: Request, config: Config) -> BoundCall:
        return wgrad.bind(request, config)

    def sources(self) -> list[KernelSource]:
        return sources.sources()
