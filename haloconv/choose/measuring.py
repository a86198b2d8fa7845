"""What choosing asks of code that measures, which stands above this one: it is registered, and loaded when asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from haloconv import env
from haloconv.families.base import Config
from haloconv.jit import LOADING
from haloconv.problem import Request
from haloconv.reference import user_wants_search


class Measuring(Protocol):
    """Code that runs kernels to learn something about them."""

    def complaint_about(self, request: Request, family: str, config: Config) -> str | None:
        """None if the config gives about PyTorch's result, else what it does; empty if there was no memory to see."""

    def measure_now(self, request: Request) -> str | None:
        """Measure a problem that no record serves and keep the record. None if that was done, else why it was not."""


ONE_AT_A_TIME = threading.RLock()
"""Held while something is measured: other measurements would disturb it."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, nothing else is measured, and no kernel is loaded: for a search of cuDNN's own."""
    with ONE_AT_A_TIME, LOADING:
        yield


_load: Callable[[], Measuring] | None = None


def register(load: Callable[[], Measuring]) -> None:
    """Let ``load()`` give what measures, at the first question."""
    global _load
    _load = load


def measuring() -> Measuring | None:
    """What measures, loaded now; None if nothing is registered."""
    return None if _load is None else _load()


def wanted() -> bool:
    """Whether a problem without a record is to be measured at its first use.

    HALOCONV_TUNE says so. Where it is unset PyTorch's own switch for a search at first use does,
    ``torch.backends.cudnn.benchmark``, in a process that has no others to wait for.
    """
    if env.tunes_at_first_use():
        return True
    return user_wants_search() and not env.never_tunes() and not in_a_group()


def in_a_group() -> bool:
    """Whether torch.distributed runs several processes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
