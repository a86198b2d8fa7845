"""What a planted fault is: a textual edit of one kernel, and the problem that must expose it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pytest import MonkeyPatch

from haloconv import plan
from haloconv.jit import source


class StaleMutation(Exception):
    """An edit no longer fits the kernel: the code that it replaces is gone, or stands there more than once."""


@dataclass(frozen=True)
class Mutation:
    """One fault, planted in the source of a shipped kernel.

    ``kernel`` names the .cu file whose joined source is edited (``halo_sm90/pack``), ``edits`` are exact pairs (old,
    new) of which each ``old`` stands there once. ``case`` (a name in ``tests.emulated``), ``dtype``, ``result`` (fprop,
    dgrad, wgrad, bgrad, relu), ``shape`` (of halo_sm90's tiles) and ``finite`` (no infinities and NaN among the inputs)
    say which run must expose the fault; the same run without the fault is one of the emulator's tests.
    """

    name: str
    kernel: str
    fault: str
    edits: tuple[tuple[str, str], ...]
    case: str
    result: str
    dtype: torch.dtype = torch.float32
    family: str = "direct"
    shape: str = ""
    finite: bool = True

    def applied_to(self, code: str) -> str:
        """The source with the fault. Raises StaleMutation if an edit does not fit, or changes nothing."""
        for old, new in self.edits:
            found = code.count(old)
            if found != 1 or old == new:
                raise StaleMutation(f"{self.name}: this stands {found} times in {self.kernel}, not once: {old!r}")
            code = code.replace(old, new)
        return code


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """While active, every kernel of that name is made from the source with the fault.

    Raises StaleMutation if the edits do not fit the kernel.
    """
    joined = source._joined
    mutant = mutation.applied_to(joined(mutation.kernel))
    with MonkeyPatch.context() as patch:
        patch.setattr(source, "_joined", lambda kernel: mutant if kernel == mutation.kernel else joined(kernel))
        _forget()
        try:
            yield
        finally:
            patch.undo()
            _forget()


def _forget() -> None:
    """Drop what was made from the source before: specialisations, and plans with their bound kernels."""
    source._specialised.cache_clear()
    plan.clear_plans()
