"""The ``halo_sm90`` family: dense and grouped layers on Hopper's tensor cores (compute capability 9.0)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from haloconv import support
from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, Kernel
from haloconv.families.halo_sm90 import sources
from haloconv.families.halo_sm90.conv import conv, conv_edges
from haloconv.families.halo_sm90.conv.configs import cost
from haloconv.families.halo_sm90.pointwise import implicit_gemm, moments, pointwise, pointwise_planes
from haloconv.families.halo_sm90.wgrad import wgrad, wgrad_edges
from haloconv.families.halo_sm90.wgrad_ss import wgrad_ss
from haloconv.jit import KernelSource
from haloconv.problem import ZEROS, Direction, Problem, Request, dense_request

_TWINS = (conv, wgrad)  # that take every layer of the family
_OF_1X1 = (pointwise, pointwise_planes)  # that take some 1x1 layers, no two the same
_EDGES = (conv_edges, wgrad_edges)  # that know padding modes
_KERNELS: dict[str, Kernel] = {twin.KERNEL: twin for twin in (*_TWINS, *_OF_1X1, implicit_gemm, wgrad_ss, *_EDGES)}
_CONV_MORE = 14000  # cycles that conv takes beside those of its model, packing among them: 30 layers on an NVIDIA H200
_WGRAD_TIMES, _WGRAD_MORE = 0.9, 17000  # what wgrad's model comes to: 24 times in 16 bits on an NVIDIA H200; cycles
_TWO_STAGES = 1.35  # what wgrad_ss's model comes to where two stages fit: it was fitted to layers that have three
# In nchw, with a copy of x or results that lanes store: the share of conv's modelled time from which implicit_gemm is
# first. Of 114 layers on an NVIDIA H200 (2026-11-28) 50 are there, at 0.4 to 1.0 of conv's time, three at 1.02 to 1.05;
# 768 channels at 128x128 pixels, whose share is 0.97, took 1.06 and 1.12 times as long, 64 channels, at 1.2, 1.3.
_WITH_COPIES = 0.95
_RESIDUAL = 2.5  # cycles of an element of a residual in nhwc that conv takes at least, implicit_gemm next to none
_MOST_HANDED = 32 << 10  # bytes of sums that a consumer hands over in a cluster: twice as many took 1.09 to 1.16 times
_BY_DIRECTION: dict[Direction, Kernel] = {direction: twin for twin in _TWINS for direction in twin.DIRECTIONS}


def _weight_gradients(request: Request) -> list[Config]:
    """At most three configs, one of each kernel at least; first those of the one that is faster by its cost model."""
    shifted, by_descriptor = wgrad.configs(request), wgrad_ss.configs(request)
    if not (shifted and by_descriptor):
        return [*shifted, *by_descriptor]
    of_shifted = _WGRAD_TIMES * wgrad.tilings(request)[0].cycles + _WGRAD_MORE
    best = wgrad_ss.tilings(request)[0]
    is_ahead = best.cycles * (_TWO_STAGES if best.stages == 2 else 1) <= of_shifted
    first, other = (by_descriptor, shifted) if is_ahead else (shifted, by_descriptor)
    return [*first[: MOST_CONFIGS - 1], other[0]]


def _clusters_first(configs: list[Config]) -> list[Config]:
    """Where the second config is in clusters, which the model has best, and was measured ahead, it comes first.

    On 14 layers of an NVIDIA H200 (2026-11-28), 7x7 maps of ResNet-50, it took 0.77 to 0.94 of the time of no cluster.
    """
    second = configs[1].derived if len(configs) > 1 else None
    if second is not None and second.in_cluster and second.handed_bytes <= _MOST_HANDED:
        return [configs[1], configs[0], *configs[2:]]
    return configs


def _of_taps(request: Request) -> list[Config]:
    """Two of the kernel that is faster by its cost model, then one of the other one, then what more both offer."""
    by_taps, staged_once = _clusters_first(implicit_gemm.configs(request)), conv.configs(request)
    if not (by_taps and staged_once):
        return [*by_taps, *staged_once]
    tiling = staged_once[0].derived
    of_conv = cost(tiling, tiling.storage, request.facts.sm_count) + _CONV_MORE
    if request.problem.epilogue.residual:
        of_conv += _RESIDUAL * prod(request.result_shape) / request.facts.sm_count
    copies = implicit_gemm.product_of(request).copied or request.result_layout == "nchw"
    of_taps = min(implicit_gemm.cycles(request, each) for each in by_taps)
    is_ahead = of_taps <= of_conv * (_WITH_COPIES if copies else 1)
    first, other = (by_taps, staged_once) if is_ahead else (staged_once, by_taps)
    return [*first[: MOST_CONFIGS - 1], other[0], *first[MOST_CONFIGS - 1 :], *other[1:]]


class HaloSm90Family:
    """Every direction.

    fp32 is multiplied in TF32, or as sums of TF32 values; sums are fp32.
    """

    name = "halo_sm90"
    directions = tuple(_BY_DIRECTION)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    tensor_cores = True
    has_epilogue = True
    has_padding_modes = True
    depthwise = False
    capability, newer = (9, 0), False

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        return _BY_DIRECTION[problem.direction].why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        """The best ones of the kernels that take the request, some of each among the first ``MOST_CONFIGS``."""
        direction = request.problem.direction
        if request.modes != ZEROS:
            return wgrad_edges.configs(request) if direction == "wgrad" else conv_edges.configs(request)
        if direction == "wgrad":
            return _weight_gradients(request)
        special = (twin.configs(request) for twin in _OF_1X1)
        found: list[Config] = next(filter(None, special), [])
        if not found:
            return _of_taps(request)
        return [*found[: MOST_CONFIGS - 1], *conv.configs(request)][:MOST_CONFIGS]

    def bind(self, request: Request, config: Config) -> BoundCall:
        return _KERNELS[config.kernel].bind(request, config)

    def has_moments(self, request: Request, config: Config, per_image: bool = False) -> bool:
        return moments.has_moments(request, config, per_image)

    def bind_moments(
        self, request: Request, config: Config, per_image: bool = False
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        return moments.bind(request, config, per_image)

    def sources(self) -> list[KernelSource]:
        return sources.sources()
