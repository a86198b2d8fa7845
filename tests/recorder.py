"""What tests find out about kernels for their stamps: worst errors and counts, a kernel each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tools.stamps import kernels

KINDS = ("random", "exact", "fuzz")


class Recorder:
    """Of one test. ``recorder(kernels, result, precision, error)`` is called once for each result that was checked.

    ``kernels``: what ``launched()`` saw; those that have no stamp of their own are covered by the kernel beside them.
    ``kind``: ``random`` values, an ``exact`` run whose result equals the reference bit for bit, or a ``fuzz`` problem.
    """

    def __init__(self) -> None:
        self.errors: dict[tuple[str, str, str], float] = {}
        self.counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}

    def __call__(
        self, launched: Iterable[str], result: str, precision: str, error: float = 0.0, *, kind: str = "random"
    ) -> None:
        own = stamped(launched)
        self.counts[kind].update(own)
        if kind == "exact":
            return
        for kernel in own:
            key = (kernel, result, precision)
            self.errors[key] = max(self.errors.get(key, 0.0), error)

    def as_json(self) -> dict:
        """What a line of results holds: errors as [kernel, result, precision, error], counts kind by kind."""
        found = {kind: dict(counts) for kind, counts in self.counts.items() if counts}
        return {"errors": [[*key, error] for key, error in sorted(self.errors.items())], "counts": found}


def stamped(launched: Iterable[str]) -> list[str]:
    """Those of the .cu files that are kernels with a stamp of their own."""
    return sorted(set(launched).intersection(kernels()))
