"""What choosing asks of code that measures, which stands above this one: it is registered, and loaded when asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from haloconv.families.base import Config
from haloconv.problem import Request


class Measuring(Protocol):
    """Code that runs kernels to learn something about them."""

    def complaint_about(self, request: Request, family: str, config: Config) -> str | None:
        """None if the config gives about PyTorch's result, else what it does; empty if there was no memory to see."""

    def measure_now(self, request: Request) -> str | None:
        """Measure a problem that no record serves and keep the record. None if that was done, else why it was not."""


ONE_AT_A_TIME = threading.RLock()
"""Held while something is measured: other measurements would disturb it."""

_load: Callable[[], Measuring] | None = None


def register(load: Callable[[], Measuring]) -> None:
    """Let ``load()`` give what measures, at the first question."""
    global _load
    _load = load


def measuring() -> Measuring | None:
    """What measures, loaded now; None if nothing is registered."""
    return None if _load is None else _load()
