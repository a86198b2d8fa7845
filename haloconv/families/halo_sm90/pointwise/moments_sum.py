"""Host half of families/halo_sm90/pointwise/moments_sum.cu: mean and variance of a filter from those of its boxes."""

from __future__ import annotations

import torch

from haloconv.families.common import ceil_div
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape

KERNEL = "halo_sm90/moments_sum"
_THREADS, _FILTERS = 512, 8  # of a block


def source() -> KernelSource:
    """The only source."""
    return kernel_source(KERNEL, "halo_sm90_moments_sum", {})


def bind(boxes: int, filters: int, pixels: int, device: torch.device) -> Launch:
    """``launch(moments of boxes, mean, variance)``, all fp32: of pairs [box][filter] those of each filter.

    ``pixels`` are those of all boxes, whose other places have zeros.
    """
    shape = LaunchShape(ceil_div(filters, _FILTERS), _THREADS)
    return Launch(source(), device, shape, {"pixels": pixels, "boxes": boxes, "filters": filters}, pdl=True)
