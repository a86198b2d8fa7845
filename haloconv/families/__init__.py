"""The registry: every family there is, one algorithm on one kind of hardware each. Everything else asks it.

To add a family is to add a folder and a line here.
"""

from __future__ import annotations

from haloconv.families.aten import AtenFamily
from haloconv.families.base import Family
from haloconv.families.depthwise.family import DepthwiseFamily
from haloconv.families.depthwise_toeplitz.family import DepthwiseToeplitzFamily
from haloconv.families.depthwise_window.family import DepthwiseWindowFamily
from haloconv.families.direct.family import DirectFamily
from haloconv.families.grouped_sm90.family import GroupedSm90Family
from haloconv.families.halo_sm80.family import HaloSm80Family
from haloconv.families.halo_sm80_f64.family import HaloSm80F64Family
from haloconv.families.halo_sm80_wgrad.family import HaloSm80WgradFamily
from haloconv.families.halo_sm90.family import HaloSm90Family

_ALL: tuple[Family, ...] = (
    AtenFamily(),
    HaloSm80WgradFamily(),
    DirectFamily(),
    HaloSm80F64Family(),
    HaloSm80Family(),
    HaloSm90Family(),
    GroupedSm90Family(),
    DepthwiseWindowFamily(),
    DepthwiseToeplitzFamily(),
    DepthwiseFamily(),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""Every family by name, the most special last; ``aten`` is candidate 0 of every choice."""

OWN = tuple(name for name in FAMILIES if name != "aten")
"""The families that have kernels of ours."""

UNIVERSAL = "direct"
"""The family that takes every problem that one of ours takes, on every GPU that kernels of ours run on."""


def check_family(name: str) -> None:
    """Raise ValueError if ``name`` is neither ``"auto"`` nor a family's."""
    if name != "auto" and name not in FAMILIES:
        raise ValueError(f"family must be one of {('auto', *FAMILIES)}, not {name!r}")
