"""Which tests of one kernel run: all while no GPU has seen its present code, else a quarter that the commit draws.

So it is with planted faults, with tiles and a family's own cases on the emulator, and with tests that hold one kernel
alone, each with a case of its own: ``@pytest.mark.of_kernel("halo_sm90/wgrad")``. ``--every-run`` runs all.
"""

from __future__ import annotations

from zlib import crc32

import pytest

from haloconv.choose.trust import stamped
from haloconv.jit import KernelSource
from tests.mutations import MUTATIONS
from tests.mutations.mutation import Mutation

PARTS = 4


def faults(seed: int) -> list[Mutation]:
    """The planted faults that are enough without being asked for all."""
    old = stamped()
    return [one for place, one in enumerate(MUTATIONS) if one.kernel not in old or (place + seed) % PARTS == 0]


def draws(what: object, seed: int) -> bool:
    """Whether a thing of verified kernels is of this seed's quarter, by what it is printed as."""
    return (crc32(repr(what).encode()) + seed) % PARTS == 0


def sources_of_commit(sources: list[KernelSource], seed: int) -> list[KernelSource]:
    """All of kernels without a stamp, and a quarter of the others, whose code was compiled at earlier commits."""
    return [source for source in sources if source.kernel not in stamped() or draws(source.digest, seed)]


def waits(item: pytest.Item, seed: int) -> bool:
    """Whether a test is of other seeds' quarters, and a stamp of the present code lets it wait."""
    kernels = {mark.args[0] for mark in item.iter_markers("of_kernel")}
    return bool(kernels) and kernels <= set(stamped()) and not draws(item.nodeid, seed)


def leave_out(config: pytest.Config, items: list[pytest.Item], seed: int) -> None:
    """Deselects the tests that wait."""
    if config.getoption("--every-run"):
        return
    waiting = {item.nodeid for item in items if waits(item, seed)}
    if waiting:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in waiting])
        items[:] = [item for item in items if item.nodeid not in waiting]
