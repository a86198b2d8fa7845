"""Which kernels a piece of a test launched, on whatever device and in whatever thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from haloconv.jit.launch import Launch

_open: list[set[str]] = []
_call = Launch.__call__


def _noting(self: Launch, *pointers: int) -> None:
    for names in _open:
        names.add(self.source.kernel)
    _call(self, *pointers)


@contextmanager
def launched() -> Iterator[set[str]]:
    """The names of the .cu files, ``halo_sm90/conv`` for one, whose kernels are launched while it is active.

    May be nested: each context has all names of its own time.
    """
    names: set[str] = set()
    _open.append(names)
    Launch.__call__ = _noting  # type: ignore[method-assign]
    try:
        yield names
    finally:
        _open[:] = [other for other in _open if other is not names]
        if not _open:
            Launch.__call__ = _call  # type: ignore[method-assign]
