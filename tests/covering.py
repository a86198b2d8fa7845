"""A part of a long list in which all that a few of its choices can do together still happens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import combinations
from typing import TypeVar

from haloconv.jit import KernelSource

# Constants that follow from the others and from sizes: each value has to appear, in whatever company.
FOLLOWING = ("SMEM_BYTES", "RING", "STAGES")
NO_REGISTER = "SMEM_BYTES"  # the one that only assertions read: it changes no instruction

Item = TypeVar("Item", bound=Hashable)


def covering(items: Sequence[Item], features: Callable[[Item], set], kept: Collection[Item] = ()) -> list[Item]:
    """A part of ``items``, in their order, that has every feature that they have, and ``kept``.

    Greedy: the item that adds the most features, the first of equals, until none is missing. The same each time.
    """
    adds = [set(features(item)) for item in items]  # what each would add to those that are taken
    taken = {place for place, item in enumerate(items) if item in kept}
    covered = set().union(*(adds[place] for place in taken))
    while True:
        for each in adds:
            each -= covered
        best = max(range(len(adds)), key=lambda place: (len(adds[place]), -place), default=0)
        if not adds or not adds[best]:
            break
        taken.add(best)
        covered = set(adds[best])
    return [item for place, item in enumerate(items) if place in taken]


def constants_together(source: KernelSource, number: int = 2) -> set:
    """Every value of a constant in the source, and the values of every ``number`` of them; the entry counts as one.

    Constants that follow from others: each value, of ``NO_REGISTER`` only where more than one constant is to meet.
    """
    free = [("entry", source.entry), *((name, value) for name, value in source.constants if name not in FOLLOWING)]
    counted = [name for name in FOLLOWING if number > 1 or name != NO_REGISTER]
    follows = [(("entry", source.entry), each) for each in source.constants if each[0] in counted]
    return {(each,) for each in free} | set(combinations(free, number)) | set(follows)
