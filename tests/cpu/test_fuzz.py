"""Fresh problems of every family on the emulator, drawn with the commit's seed, and the fuzzer itself."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from haloconv import emulator
from tests.fuzz import campaign
from tests.fuzz.campaign import Tally, commit_seed, draws
from tests.fuzz.check import check
from tests.fuzz.draw import SUBJECTS, Draw, parsed
from tests.fuzz.outcome import Failure
from tests.fuzz.shrink import shrunk, simpler
from tests.mutations import MUTATIONS
from tests.mutations.mutation import planted
from tools.stamps import ROOT

MISSING = emulator.available()
PARTS = range(2)  # of a family, each on a process of its own
PROBLEMS = 8  # in a part: 160 in all
SHRINK_S = 30.0
FAULT = "the last row is not written"

needs_emulator = pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
pytestmark = pytest.mark.usefixtures("emulator_cache")


@needs_emulator
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", SUBJECTS)
def test_fresh_problems(family: str, part: int) -> None:
    seed = commit_seed()
    print(f"seed {seed}: FUZZ_SEED={seed} draws the same")
    tally = Tally()
    for draw in draws(f"{seed} {part}", "cpu", (family,), per_layer=3):
        outcome = check(draw, "cpu")
        tally.add(outcome)
        if isinstance(outcome, Failure):
            pytest.fail(f"{outcome}\nshrunk: {shrunk(outcome, 'cpu', SHRINK_S)}", pytrace=False)
        if tally.problems == PROBLEMS:
            break
    print(tally)
    assert tally.right >= 2 * PROBLEMS


def test_a_seed_draws_the_same_and_another_one_does_not() -> None:
    first, again, other = (list(islice(draws(seed, "cpu"), 30)) for seed in (1, 1, 2))
    assert first == again and not set(first) & set(other)
    assert {draw.family for draw in first} <= set(SUBJECTS)


def test_the_seed_is_that_of_the_commit_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(campaign.SEED, "17")
    assert commit_seed() == 17
    monkeypatch.delenv(campaign.SEED)
    monkeypatch.setattr(campaign, "environment_stamp", lambda: {"commit": "0123456789ab-dirty"})
    assert commit_seed() == 0x01234567
    monkeypatch.setattr(campaign, "environment_stamp", lambda: {"commit": "none"})
    assert commit_seed() > 0


def test_a_line_says_all_of_a_draw() -> None:
    for draw in islice(draws(3, "cpu"), 60):
        assert parsed(str(draw)) == draw
    with pytest.raises(ValueError, match="no field"):
        parsed("family=direct color=red")


def test_steps_are_simpler_and_never_the_same() -> None:
    for draw in islice(draws(4, "cpu"), 40):
        steps = list(simpler(draw))
        assert steps and draw not in steps


@needs_emulator
def test_a_planted_fault_is_found_and_made_small() -> None:
    """One channel of each result keeps what was in memory."""
    (mutation,) = (one for one in MUTATIONS if one.name == FAULT)
    with planted(mutation):
        outcomes = (check(draw, "cpu") for draw in islice(draws(5, "cpu", ("direct",)), 24))
        failure = next(outcome for outcome in outcomes if isinstance(outcome, Failure))
        small = shrunk(failure, "cpu", SHRINK_S)
        assert isinstance(check(parsed(str(small.draw)), "cpu"), Failure)
    assert _volume(small.draw) <= _volume(failure.draw) and "--replay" in str(small)
    assert isinstance(check(small.draw, "cpu"), list)


def _volume(draw: Draw) -> int:
    n, c, h, w = draw.x
    k, r, s = draw.filters
    return n * c * h * w * k * r * s


@needs_emulator
def test_a_campaign_leaves_a_line_of_each_process(tmp_path: Path) -> None:
    kept = tmp_path / "fuzz.jsonl"
    words = ["--seconds=4", "--jobs=2", "--seed=5", "--device=cpu", "--family=direct", f"--keep={kept}"]
    assert subprocess.run([sys.executable, "-m", "tests.fuzz", *words], cwd=ROOT, check=False).returncode == 0
    lines = [json.loads(text) for text in kept.read_text("utf-8").splitlines()]
    assert sorted(line["seed"] for line in lines) == [5, 6]
    for line in lines:
        assert line["problems"] > 0 and line["right"] >= line["problems"] and line["wrong"] == []
        assert set(line["results"]) >= {"direct/direct"} and line["commit"] and line["device"] == "cpu"


def test_what_is_wrong_stands_in_the_line_with_its_replay() -> None:
    draw = next(draws(1, "cpu", ("direct",)))
    tally = Tally()
    tally.add(Failure(draw, "direct/direct k4", "AssertionError: off"))
    assert tally.as_json() == {"problems": 1, "right": 0, "wrong": [f"direct/direct k4 {draw}"], "results": {}}
