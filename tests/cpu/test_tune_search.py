"""PyTorch's convolution is timed after two searches of cuDNN, because what a search finds is chance."""

from __future__ import annotations

import pytest
import torch

from haloconv.families.base import Config
from haloconv.tune import measure
from haloconv.tune.baseline import searched_again
from tests.tuned import Clock, favouring

CPU = torch.device("cpu")


def _candidate(family: str) -> measure.Candidate:
    return measure.Candidate(family, Config(f"{family}/fake"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(favouring("special"))
    monkeypatch.setattr(measure, "compare", made)
    return made


@pytest.mark.parametrize(("again", "counts"), [(0.4, 0.4), (1.5, 1.0)])
def test_the_better_of_two_searches_counts(clock: Clock, again: float, counts: float) -> None:
    own = _candidate("special")
    clock.ms_of = lambda name: {"aten": 1.0, "special": 0.5}.get(name, again)
    calls = {measure.ATEN: lambda: None, own: lambda: None}
    timings = measure._timed(calls, lambda: None, CPU, 0.0)
    assert list(timings) == [measure.ATEN, own] and timings[measure.ATEN].ms == counts
    assert measure._timed(calls, None, CPU, 0.0)[measure.ATEN].ms == 1.0
    rounds = len(clock.rounds)
    assert list(measure._timed({measure.ATEN: lambda: None}, lambda: None, CPU, 0.0)) == [measure.ATEN]
    assert clock.rounds[rounds:] == [("aten",)], "none of ours is there to win"


def test_no_second_search_where_ours_is_far_behind(clock: Clock) -> None:
    clock.ms_of = lambda name: 1.0 if name == "aten" else 3.0
    calls = {each: lambda: None for each in (measure.ATEN, _candidate("direct"), _candidate("special"))}
    measure._timed(calls, lambda: None, CPU, 0.0)
    assert not any("search" in name for names in clock.rounds for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_search_has_the_same_operands_at_another_alignment(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last)
    given: list[tuple] = []
    call = searched_again(lambda *operands: given.append(operands), (x, None))
    call(), call()
    copy, nothing = given[0]
    assert torch.equal(copy, x) and copy.stride() == x.stride() and nothing is None
    assert copy.storage_offset() * copy.element_size() == 16 and given[1][0] is copy, "copied once"
