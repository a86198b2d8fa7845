"""The ``toy`` family: filters of one pixel, a thread an output."""

from __future__ import annotations

import torch
from haloconv.families.toy import pointwise

from haloconv.families.base import BoundCall, Config
from haloconv.jit import KernelSource
from haloconv.problem import Direction, Problem, Request, dense_request


class ToyFamily:
    """What the contract asks for, of one kernel."""

    name = "toy"
    directions: tuple[Direction, ...] = ("fprop",)
    dtypes = (torch.float32,)
    tensor_cores = False
    has_epilogue = False
    has_padding_modes = False
    depthwise = False
    capability, newer = (7, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        return pointwise.why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        return pointwise.configs(request)

    def bind(self, request: Request, config: Config) -> BoundCall:
        return pointwise.bind(request, config)

    def sources(self) -> list[KernelSource]:
        return [pointwise.source(threads) for threads in pointwise.THREADS]
