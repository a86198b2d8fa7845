"""The kernel texts that stand for each family: what CI compiles, and ``haloconv bench --compile-time`` times."""

from __future__ import annotations

from collections.abc import Callable

from haloconv.families.depthwise.family import DepthwiseFamily
from haloconv.families.depthwise_toeplitz.family import DepthwiseToeplitzFamily
from haloconv.families.depthwise_window.window import DepthwiseWindowFamily
from haloconv.families.direct.family import DirectFamily
from haloconv.families.grouped_sm90.family import GroupedSm90Family
from haloconv.families.halo_sm80.family import HaloSm80Family
from haloconv.families.halo_sm80_wgrad.family import HaloSm80WgradFamily
from haloconv.families.halo_sm90.family import HaloSm90Family
from haloconv.jit import KernelSource

SHIPPED: dict[str, Callable[[], list[KernelSource]]] = {
    "direct": DirectFamily().sources,
    "halo_sm80": HaloSm80Family().sources,
    "halo_sm80_wgrad": HaloSm80WgradFamily().sources,
    "halo_sm90": HaloSm90Family().sources,
    "grouped_sm90": GroupedSm90Family().sources,
    "depthwise_window": DepthwiseWindowFamily().sources,
    "depthwise_toeplitz": DepthwiseToeplitzFamily().sources,
    "depthwise": DepthwiseFamily().sources,
}
