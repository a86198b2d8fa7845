"""Fresh calls of the functions beside conv2d on the emulator, drawn with the commit's seed, and their fuzzer itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from haloconv import emulator
from haloconv.transposed import Transposed
from tests.fuzz.campaign import WORK, Tally, all_draws, commit_seed
from tests.fuzz.check import check
from tests.fuzz.draw import Draw
from tests.fuzz.front_draw import FUNCTIONS, FrontDraw, front_draws, parsed_line
from tests.fuzz.outcome import Failure
from tests.fuzz.shrink import shrunk, simpler

MISSING = emulator.available()
CALLS, MOST_CALLS = 4, 200  # of a function
SHRINK_S = 5.0

needs_emulator = pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
pytestmark = pytest.mark.usefixtures("emulator_cache")


def drawn(seed: int | str, function: str, count: int) -> list[FrontDraw]:
    return list(islice(front_draws(seed, (function,), WORK["cpu"]), count))


@needs_emulator
@pytest.mark.parametrize("function", FUNCTIONS)
def test_fresh_calls(function: str) -> None:
    """Forward and all gradients, bit by bit, until enough calls are done and enough results are by our kernels."""
    seed, tally = commit_seed(), Tally()
    print(f"seed {seed}: FUZZ_SEED={seed} draws the same")
    for draw in drawn(seed, function, MOST_CALLS):
        outcome = check(draw, "cpu")
        tally.add(outcome)
        if isinstance(outcome, Failure):
            pytest.fail(f"{outcome}\nshrunk: {shrunk(outcome, 'cpu', SHRINK_S)}", pytrace=False)
        if tally.problems >= CALLS and tally.results.total() >= CALLS:
            break
    print(tally)
    assert tally.right >= 2 * CALLS and tally.results.total() >= CALLS


def _one_less(self: Transposed, x_shape: tuple, w_shape: tuple, real: Callable = Transposed.y_shape) -> tuple:
    *others, last = real(self, x_shape, w_shape)
    return (*others, max(1, last - 1))


@needs_emulator
def test_a_planted_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed signals are a sample too short."""
    calls = drawn(4, "conv_transpose1d", 40)
    monkeypatch.setattr(Transposed, "y_shape", _one_less)
    failure = next(each for each in (check(call, "cpu") for call in calls) if isinstance(each, Failure))
    small = shrunk(failure, "cpu", SHRINK_S)
    line = str(small).rpartition("--replay ")[2].strip("'")
    assert isinstance(check(parsed_line(line), "cpu"), Failure)
    assert isinstance(small.draw, FrontDraw) and small.draw.products <= failure.draw.products
    monkeypatch.undo()
    assert isinstance(check(small.draw, "cpu"), list)


def test_a_line_says_all_of_a_call() -> None:
    for draw in islice(all_draws(3, "cpu", ("direct", *FUNCTIONS)), 40):
        assert parsed_line(str(draw)) == draw and type(parsed_line(str(draw))) is type(draw)
    with pytest.raises(ValueError, match="no field"):
        parsed_line("function=conv1d color=red")


def test_a_seed_draws_the_same_and_another_one_does_not() -> None:
    first, again, other = (list(islice(all_draws(seed, "cpu", ("direct", *FUNCTIONS)), 24)) for seed in (1, 1, 2))
    assert first == again and not set(first) & set(other)
    kinds = [each.family if isinstance(each, Draw) else each.function for each in first]
    assert set(kinds) == {"direct", *FUNCTIONS} and kinds.count("direct") == 12


def test_steps_are_simpler_and_never_the_same() -> None:
    for draw in islice(front_draws(5, FUNCTIONS, WORK["cpu"]), 40):
        steps = list(simpler(draw))
        assert steps and draw not in steps
