"""The ``grouped_sm90`` family: groups of 8 and 16 channels in channels_last on tensor cores, with TMA, from Hopper on.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. The weight gradient is one of 16
bits. Tensors whose channels TMA does not reach go to the kernels of ``halo_sm80`` and ``halo_sm80_wgrad``.
"""

from __future__ import annotations

import torch

from haloconv.families.base import BoundCall, Config, Family
from haloconv.families.grouped_sm90 import conv, sources, wgrad
from haloconv.families.grouped_sm90.slab import LEAST_CAPABILITY
from haloconv.families.halo_sm80.family import HaloSm80Family
from haloconv.families.halo_sm80_wgrad.family import HaloSm80WgradFamily
from haloconv.jit import KernelSource
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, dense_request

_TWINS = {"fprop": conv, "dgrad": conv, "wgrad": wgrad}
_OLDER: dict[Direction, Family] = {
    "fprop": HaloSm80Family(),
    "dgrad": HaloSm80Family(),
    "wgrad": HaloSm80WgradFamily(),
}


class GroupedSm90Family:
    """Grouped layers of few channels in channels_last, stride 1, in every direction."""

    name = "grouped_sm90"
    directions: tuple[Direction, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    tensor_cores = True
    has_epilogue = False
    has_padding_modes = False
    depthwise = False
    capability, newer = LEAST_CAPABILITY, True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = _OLDER[problem.direction].why_not(problem, device)
        return reason or _TWINS[problem.direction].why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        direction = request.problem.direction
        return _TWINS[direction].configs(request) or _OLDER[direction].configs(request)

    def bind(self, request: Request, config: Config) -> BoundCall:
        direction = request.problem.direction
        twin = _TWINS[direction]
        return (twin if config.kernel == twin.KERNEL else _OLDER[direction]).bind(request, config)

    def sources(self) -> list[KernelSource]:
        return sources.sources()
