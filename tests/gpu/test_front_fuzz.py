"""Fresh calls of the functions beside conv2d, drawn with the commit's seed: forward and all gradients, bit by bit."""

from __future__ import annotations

import time
from itertools import islice

import pytest

from tests.fuzz.campaign import WORK, Tally, commit_seed
from tests.fuzz.check import check
from tests.fuzz.front_draw import FUNCTIONS, front_draws
from tests.fuzz.outcome import Failure
from tests.fuzz.shrink import shrunk

PIECES = 4  # of a function, each for a process of its own
CALLS = 40  # in a piece
SHRINK_S = 60.0


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_fresh_calls(function: str, piece: int, pytestconfig: pytest.Config) -> None:
    seed, limit_s = commit_seed(), pytestconfig.getoption("--fuzz-seconds")
    print(f"seed {seed}: FUZZ_SEED={seed} draws the same")
    until, tally = time.monotonic() + limit_s, Tally()
    for draw in islice(front_draws(f"{seed} {piece}", (function,), WORK["cuda"]), CALLS):
        outcome = check(draw, "cuda")
        tally.add(outcome)
        if isinstance(outcome, Failure):
            pytest.fail(f"{outcome}\nshrunk: {shrunk(outcome, 'cuda', SHRINK_S)}", pytrace=False)
        if limit_s and time.monotonic() >= until:
            break
    print(tally)
    assert tally.right and sum(tally.results.values())
