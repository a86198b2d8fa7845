"""What came of a draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.fuzz.draw import Draw
from tests.fuzz.front_draw import FrontDraw


@dataclass(frozen=True)
class Failure:
    """What is wrong with a draw, in one sentence."""

    draw: Draw | FrontDraw
    config: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.sentence}\n  {self.config or 'its config'}; replay: python -m tests.fuzz --replay '{self.draw}'"


class Checked(NamedTuple):
    """One result that was right: the kernels that were launched, ``kind`` exact or fuzz, and its norm error.

    The error is 0 where the norm says little: for exact integers, few products, and values that cancel or repeat.
    """

    kernels: frozenset[str]
    kind: str
    error: float
