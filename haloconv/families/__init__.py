"""The registry: every family there is, one algorithm on one kind of hardware each. Everything else asks it.

To add a family is to add a folder and a line here. A family is loaded when it is first asked something: a model needs
two or three, and their modules are most of the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module

from haloconv.families.aten import AtenFamily
from haloconv.families.base import Family

_CLASSES = {
    "halo_sm80_wgrad": "HaloSm80WgradFamily",
    "direct": "DirectFamily",
    "halo_sm80_f64": "HaloSm80F64Family",
    "halo_sm80": "HaloSm80Family",
    "halo_sm90": "HaloSm90Family",
    "grouped_sm90": "GroupedSm90Family",
    "depthwise_window": "DepthwiseWindowFamily",
    "depthwise_toeplitz": "DepthwiseToeplitzFamily",
    "depthwise": "DepthwiseFamily",
}
"""By name of a family its class, of the module ``family`` in the folder of that name."""


class _Registry(MutableMapping[str, Family]):
    """Families by name, in an order that means something. What stands as the name of a class is made when asked for.

    Families have no state: it does not matter if two threads make one each.
    """

    def __init__(self, families: Mapping[str, Family | str]) -> None:
        self._families = dict(families)

    def __getitem__(self, name: str) -> Family:
        found = self._families[name]
        if not isinstance(found, str):
            return found
        family: Family = getattr(import_module(f"{__name__}.{name}.family"), found)()
        self._families[name] = family
        return family

    def __contains__(self, name: object) -> bool:
        return name in self._families

    def __setitem__(self, name: str, family: Family) -> None:
        self._families[name] = family

    def __delitem__(self, name: str) -> None:
        del self._families[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._families)

    def __len__(self) -> int:
        return len(self._families)


FAMILIES = _Registry({"aten": AtenFamily(), **_CLASSES})
"""Every family by name, the most special last; ``aten`` is candidate 0 of every choice."""

OWN = tuple(name for name in FAMILIES if name != "aten")
"""The families that have kernels of ours."""

UNIVERSAL = "direct"
"""The family that takes every problem that one of ours takes, on every GPU that kernels of ours run on."""


def check_family(name: str) -> None:
    """Raise ValueError if ``name`` is neither ``"auto"`` nor a family's."""
    if name != "auto" and name not in FAMILIES:
        raise ValueError(f"family must be one of {('auto', *FAMILIES)}, not {name!r}")
