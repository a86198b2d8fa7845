"""The kernel texts that stand for each family: what CI compiles, and ``haloconv bench --compile-time`` times."""

from __future__ import annotations

from collections.abc import Callable

from haloconv.families import (
    depthwise,
    depthwise_toeplitz,
    depthwise_window,
    direct,
    halo_sm80_shipped,
    halo_sm80_wgrad,
    halo_sm90_shipped,
)
from haloconv.jit import KernelSource

SHIPPED: dict[str, Callable[[], list[KernelSource]]] = {
    "direct": direct.shipped_sources,
    "halo_sm80": halo_sm80_shipped.shipped_sources,
    "halo_sm80_wgrad": halo_sm80_wgrad.shipped_sources,
    "halo_sm90": halo_sm90_shipped.shipped_sources,
    "depthwise_window": depthwise_window.shipped_sources,
    "depthwise_toeplitz": depthwise_toeplitz.shipped_sources,
    "depthwise": depthwise.shipped_sources,
}
