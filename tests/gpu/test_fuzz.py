"""Fresh problems of every family, drawn with the commit's seed: many sizes on each layer, as layers cost compiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest

from tests.families import DIRECT, SPECIALS, SUBJECTS, Subject, over
from tests.fuzz.campaign import Tally, by_layer, commit_seed
from tests.fuzz.check import check, prepare
from tests.fuzz.draw import REDUCE, Draw
from tests.fuzz.outcome import Checked, Failure
from tests.fuzz.shrink import shrunk

PIECES = 4  # of a family, each for a process of its own
RESULTS = 750  # right ones in a piece: 24,000 in all
SHRINK_S = 60.0
PARTS = over(*((subject, piece) for subject in (*SUBJECTS, *SPECIALS) for piece in range(PIECES)))


@pytest.mark.parametrize(("subject", "piece"), PARTS, ids=str)
def test_fresh_problems(
    subject: Subject, piece: int, in_threads: Callable, pytestconfig: pytest.Config, record: Callable
) -> None:
    """Exact on small integers, within the limits on random values, fenced, poisoned, the same bits twice."""
    seed, limit_s = commit_seed(), pytestconfig.getoption("--fuzz-seconds")
    print(f"seed {seed}: FUZZ_SEED={seed} draws the same")
    families = (subject.name, REDUCE) if subject is DIRECT else (subject.name,)
    until, tally = time.monotonic() + limit_s, Tally()
    for draw, outcome in outcomes(by_layer(f"{seed} {piece}", "cuda", families), in_threads):
        tally.add(outcome)
        if isinstance(outcome, Failure):
            pytest.fail(f"{outcome}\nshrunk: {shrunk(outcome, 'cuda', SHRINK_S)}", pytrace=False)
        for each in outcome:
            record(each.kernels, draw.result, draw.precision, each.error, kind=each.kind)
        if tally.right >= RESULTS or (limit_s and time.monotonic() >= until):
            break
    print(tally)
    assert tally.right >= RESULTS or limit_s


def outcomes(layers: Iterable[list[Draw]], in_threads: Callable) -> Iterator[tuple[Draw, list[Checked] | Failure]]:
    """What came of each draw. The kernels of a layer are compiled side by side."""
    for layer in layers:
        in_threads(partial(prepare, draw, "cuda") for draw in layer)
        yield from ((draw, check(draw, "cuda")) for draw in layer)
