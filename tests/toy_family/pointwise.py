"""Host half of families/toy/pointwise.cu: what it takes, its configs, and how one is bound."""

from __future__ import annotations

import torch

from haloconv import support
from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ceil_div, dense_call, named
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Request

KERNEL = "toy/pointwise"
THREADS = (128, 64)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence."""
    problem = request.problem
    reason = support.why_not(problem, request.device)
    if reason is not None:
        return reason
    if problem.direction != "fprop" or problem.dtype != torch.float32:
        return "toy has the forward direction in fp32 alone"
    if (problem.r, problem.s, problem.stride, problem.groups) != (1, 1, (1, 1), 1) or any(problem.padding):
        return "toy takes filters of one pixel, stride 1, no padding, no groups"
    return None


def configs(request: Request) -> list[Config]:
    """The best first: more threads where there are more outputs. ``derived`` is the number of threads."""
    ordered = THREADS if request.problem.n * request.problem.h * request.problem.w >= 64 else THREADS[::-1]
    return [Config(KERNEL, f"threads{threads}", threads) for threads in ordered]


def source(threads: int) -> KernelSource:
    """One source a config."""
    return kernel_source(KERNEL, "toy_pointwise", {"ELEM": "float", "THREADS": threads})


def bind(request: Request, config: Config) -> BoundCall:
    """``fprop(x, w, b) -> y``."""
    problem, threads = request.problem, config.derived
    n, k, p, q = problem.y_shape
    outputs = n * k * p * q
    fields = {
        **named("x", "nchw", request.first.strides),
        **named("w", "kc..", request.second.strides),
        **named("y", "nkpq", request.result_strides),
        **{"outputs": outputs, "k": k, "p": p, "q": q, "c": problem.c},
    }
    launch = Launch(source(threads), request.device, LaunchShape(ceil_div(outputs, threads), threads), fields)
    return dense_call(launch, problem, request.result_shape, request.result_strides)
