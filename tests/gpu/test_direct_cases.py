"""Every named problem in every dtype and direction: right, fenced, poisoned, repeatable, inputs untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import oracle
from tests.cases import FULL_CASES, Case, case_dtypes, case_id, make

PLAIN = ("contiguous", "channels_last")


@pytest.fixture(scope="module")
def warm(warm_up: Callable) -> None:
    warm_up(case_dtypes())


@pytest.mark.parametrize("result", oracle.RESULTS)
@pytest.mark.parametrize(("one", "dtype"), case_dtypes(), ids=case_id)
def test_case(one: Case, dtype: torch.dtype, result: str, warm: None, record_error: Callable) -> None:
    forced = one.on("direct")
    t = make(forced, dtype, "cuda")
    with oracle.Unchanged(t), oracle.RedZones("cuda") as zones:
        got = oracle.run(result, t, forced)
        again = oracle.run(result, t, forced)
    error = oracle.check(result, got, t, forced.spec)
    assert oracle.same_bits(got, again), f"{result}: two runs differ"
    watched = zones.check()
    assert watched >= 2 or one.problem().is_empty, (
        "no allocation was watched, so that neither poison nor fences were there"
    )
    record_error("direct", result, dtype, error.norm)


@pytest.mark.parametrize("one", [c for c in FULL_CASES if c.storage in PLAIN and c.w_storage == PLAIN[0]], ids=case_id)
def test_results_have_the_layout_asked_for(one: Case, warm: None) -> None:
    forced = one.on("direct")
    t = make(forced, torch.float32, "cuda")
    y, dx = oracle.run("fprop", t, forced), oracle.run("dgrad", t, forced)
    wanted = torch.channels_last if one.storage == "channels_last" else torch.contiguous_format
    assert y.is_contiguous(memory_format=wanted) and dx.is_contiguous(memory_format=wanted)
