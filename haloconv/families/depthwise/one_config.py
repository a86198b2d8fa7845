"""Why a kernel that has one config for a request does not take it, or that config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from haloconv.families.base import Config, config_key
from haloconv.problem import Problem, Request

Tiling = TypeVar("Tiling")


@dataclass(frozen=True)
class OneConfig(Generic[Tiling]):
    """What ``why_not`` and ``configs`` of such a kernel's host file ask.

    ``refused`` gives None, or the sentence that says why the kernel does not take a request, but for its room;
    ``tiling`` the tiling of a problem, and ``cut`` what binding needs beside it. None of either says that it does not
    fit, for which ``no_room`` is the sentence.
    """

    kernel: str
    refused: Callable[[Request], str | None]
    tiling: Callable[[Problem], Tiling | None]
    cut: Callable[[Request, Tiling], Any]
    no_room: str

    def why_not(self, request: Request) -> str | None:
        """None if the kernel takes the request, else a sentence that says why not."""
        return self.refused(request) or (None if self.configs(request) else self.no_room)

    def configs(self, request: Request) -> list[Config]:
        """The config, its ``derived`` the pair of tiling and cut; empty if the kernel does not take the request."""
        tiling = self.tiling(request.problem) if self.refused(request) is None else None
        cut = None if tiling is None else self.cut(request, tiling)
        return [] if cut is None else [Config(self.kernel, config_key(tiling), (tiling, cut))]
