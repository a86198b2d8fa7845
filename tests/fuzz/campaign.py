"""Many draws: their seed, their order, and what came of them."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from haloconv.env import environment_stamp
from tests.fuzz.draw import SUBJECTS, Draw, layers, sizes
from tests.fuzz.front_draw import FUNCTIONS, FrontDraw, front_draws
from tests.fuzz.outcome import Checked, Failure

SEED = "FUZZ_SEED"  # the environment variable that overrides the commit's seed
WORK = {"cpu": 150_000, "cuda": 40_000_000}  # products formed for one problem, at most
PER_LAYER = {"cpu": 4, "cuda": 40}  # problems on a layer: kernels are compiled once for most of them
_WITHOUT_GIT = 20261123


def commit_seed() -> int:
    """``FUZZ_SEED`` if it is set; else the commit's hash as a number, so that each commit draws anew."""
    if os.environ.get(SEED):
        return int(os.environ[SEED])
    found = re.match("[0-9a-f]{8}", environment_stamp()["commit"])
    return int(found[0], 16) if found else _WITHOUT_GIT


def by_layer(
    seed: int | str, device: str, families: tuple[str, ...] = SUBJECTS, per_layer: int | None = None
) -> Iterator[list[Draw]]:
    """Layers without end, the families alternating, with ``per_layer`` problems each. A seed always gives the same."""
    rng, count = random.Random(f"{seed}"), per_layer or PER_LAYER[device]
    for layer in layers(rng, device, families, WORK[device]):
        yield sizes(rng, layer, count, WORK[device])


def draws(
    seed: int | str, device: str, families: tuple[str, ...] = SUBJECTS, per_layer: int | None = None
) -> Iterator[Draw]:
    """The problems of `by_layer`, one after the other."""
    return chain.from_iterable(by_layer(seed, device, families, per_layer))


def all_draws(seed: int | str, device: str, subjects: tuple[str, ...]) -> Iterator[Draw | FrontDraw]:
    """Problems of the families and calls of the functions among ``subjects``, alternating where there are both."""
    families = tuple(each for each in subjects if each in SUBJECTS)
    functions = tuple(each for each in subjects if each in FUNCTIONS)
    streams: list[Iterator[Draw | FrontDraw]] = [draws(seed, device, families)] if families else []
    streams += [front_draws(seed, functions, WORK[device])] if functions else []
    for several in zip(*streams, strict=False):
        yield from several


@dataclass
class Tally:
    """What a campaign has checked: problems, right results, also by kernel, and failures."""

    problems: int = 0
    right: int = 0
    results: Counter = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, outcome: list[Checked] | Failure) -> None:
        self.problems += bool(outcome)
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
        else:
            self.results.update(kernel for each in outcome for kernel in each.kernels)
            self.right += len(outcome)

    def as_json(self) -> dict:
        """What a campaign's line holds: counts, results also by kernel, and the replay of what was wrong."""
        wrong = [f"{each.config} {each.draw}" for each in self.failures]
        return {
            "problems": self.problems,
            "right": self.right,
            "wrong": wrong,
            "results": dict(sorted(self.results.items())),
        }

    def __str__(self) -> str:
        kernels = ", ".join(f"{name} {count}" for name, count in sorted(self.results.items()))
        checked = f"{self.problems} problems, {self.right} results right, {len(self.failures)} problems wrong"
        return f"{checked} ({kernels})"
