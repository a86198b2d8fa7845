"""The ``depthwise`` family: layers of one channel a group, with fp32 sums.

Threads march down rows in registers. Aligned rows in 16 bits run on Hopper's tensor cores, as do filter gradients in
16-bit channels_last; filters of more than 9 taps on aligned rows are staged in shared memory and run on older ones (16
bits) or in register tiles (fp32). On Hopper rows of neighbouring channels in fp32 land in shared memory, and planes
come as boxes where there are many taps. Small planes, whose rows begin anywhere, come many at a time.
"""

from __future__ import annotations

import torch

from haloconv import support
from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, Kernel
from haloconv.families.depthwise import (
    band,
    band_wgrad,
    box,
    box_wgrad,
    lanes,
    lanes_wgrad,
    march,
    march_form,
    march_wgrad,
    pairs,
    pairs_wgrad,
    patch,
    patch_wgrad,
    plane,
    plane_wgrad,
    sources,
    tile,
    tile_sm90,
)
from haloconv.jit import KernelSource
from haloconv.problem import DIRECTIONS, Problem, Request, dense_request

_DENSE = (lanes, pairs, patch, band, box, tile_sm90, tile, plane, march)  # of fprop and dgrad, best first
_WGRAD = (lanes_wgrad, patch_wgrad, box_wgrad, band_wgrad, pairs_wgrad, plane_wgrad, march_wgrad)
_KERNELS: dict[str, Kernel] = {twin.KERNEL: twin for twin in (*_DENSE, *_WGRAD)}


class DepthwiseFamily:
    """Layers of one channel a group and few taps. fp32 products are formed in full precision, TF32 allowed or not."""

    name = "depthwise"
    directions = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = march_form.DTYPES
    tensor_cores = False  # what they multiply in 16 bits, CUDA cores do where they are not taken
    has_epilogue = True
    has_padding_modes = False
    depthwise = True
    capability, newer = (7, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        if problem.c_per_group != 1:
            return f"a group has {problem.c_per_group} channels; the depthwise kernels take one"
        if problem.dtype not in self.dtypes:
            return f"the depthwise kernels do not take {problem.dtype}"
        return march_form.why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        """The one of each special kernel that takes the request; then those of the march, which takes all."""
        twins = _WGRAD if request.problem.direction == "wgrad" else _DENSE
        return [config for twin in twins for config in twin.configs(request)][:MOST_CONFIGS]

    def bind(self, request: Request, config: Config) -> BoundCall:
        return _KERNELS[config.kernel].bind(request, config)

    def sources(self) -> list[KernelSource]:
        return sources.sources()
