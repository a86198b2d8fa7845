"""Every named problem in every family, dtype and direction: right, exact, fenced, repeatable, inputs untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import oracle
from tests.cases import FULL_CASES, Case, case_dtypes, make
from tests.families import SUBJECTS, Subject, computing, name_of, over
from tests.gpu.runs import check_integers
from tests.launches import launched

PLAIN = ("contiguous", "channels_last")
RUNS = over(
    *(
        (subject, one, dtype, result)
        for subject in SUBJECTS
        for one, dtype in case_dtypes()
        if dtype in subject.dtypes
        for result in subject.results
    )
)
PLAIN_CASES = [one for one in FULL_CASES if one.storage in PLAIN and one.w_storage == PLAIN[0]]


@pytest.fixture
def warm(subject: Subject, request: pytest.FixtureRequest, warm_up: Callable) -> None:
    wanted = request.node.callspec.params.get("dtype", torch.float32)
    warm_up(f"cases {wanted}", subject, ((one, dtype) for one, dtype in case_dtypes() if dtype == wanted))


@pytest.mark.parametrize(("subject", "one", "dtype", "result"), RUNS, ids=name_of)
def test_case(subject: Subject, one: Case, dtype: torch.dtype, result: str, warm: None, record: Callable) -> None:
    forced = subject.on(one, dtype)
    t = make(forced, dtype, "cuda")
    with oracle.Unchanged(t), oracle.RedZones("cuda") as zones, launched() as names:
        got = oracle.run(result, t, forced)
        again = oracle.run(result, t, forced)
    error = oracle.check(result, got, t, forced.spec)
    assert oracle.same_bits(got, again), f"{result}: two runs differ"
    watched = zones.check()
    assert watched >= 2 or one.problem().is_empty, (
        "no allocation was watched, so that neither poison nor fences were there"
    )
    record(names, result, subject.label(dtype), error.norm)
    check_integers(subject, result, forced, dtype, record)


@pytest.mark.parametrize(
    ("subject", "one"),
    over(*((subject, one) for subject in computing("fprop", "dgrad") for one in PLAIN_CASES)),
    ids=name_of,
)
def test_results_have_the_layout_asked_for(subject: Subject, one: Case, warm: None) -> None:
    forced = subject.on(one, torch.float32)
    t = make(forced, torch.float32, "cuda")
    y, dx = oracle.run("fprop", t, forced), oracle.run("dgrad", t, forced)
    wanted = torch.channels_last if one.storage == "channels_last" else torch.contiguous_format
    assert y.is_contiguous(memory_format=wanted) and dx.is_contiguous(memory_format=wanted)
