"""The random sample of ``haloconv bench --sample``: which problems it draws, and what it makes of their times."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from haloconv.bench import sample, suite, trial
from haloconv.bench.layer import LAYOUTS
from haloconv.cli import bench_suite
from haloconv.problem import DIRECTIONS

CPU = torch.device("cpu")
QUICK = trial.Budget(seconds=0.0, min_runs=2)


def test_the_same_seed_draws_the_same_problems() -> None:
    assert sample.sample(30, 7) == sample.sample(30, 7)
    assert sample.sample(30, 7) != sample.sample(30, 8)
    assert sample.sample(30, 7)[:10] == sample.sample(10, 7)


def test_a_hundred_problems_have_every_kind_direction_precision_and_layout() -> None:
    drawn = sample.sample(100, 0)
    assert {each.case.name.split()[0] for each in drawn} == {"depthwise", "grouped", "stem"}
    assert {each.direction for each in drawn} == set(DIRECTIONS)
    assert {each.precision for each in drawn} == set(suite.PRECISIONS)
    assert {each.layout for each in drawn} == set(LAYOUTS)
    assert len({each.case.name for each in drawn}) > 95


@pytest.mark.parametrize("seed", range(5))
def test_problems_are_legal_and_of_bounded_size(seed: int) -> None:
    for each in sample.sample(60, seed):
        problem = each.problem
        n, k, p, q = problem.y_shape
        assert min(n, k, p, q) > 0, each
        assert max(problem.n * problem.c * problem.h * problem.w, n * k * p * q) <= 2 * sample._ELEMENTS, each
        assert problem.flops <= 4 * sample._PRODUCTS, each


def test_the_problem_is_that_of_the_layer() -> None:
    for each in sample.sample(40, 3):
        if each.case.input[0] * each.case.input[1] * each.case.input[2] * each.case.input[3] < 1 << 21:
            layer = each.case.layer(each.precision, each.layout, "auto", CPU)
            assert layer.problem(each.direction) == each.problem


def small() -> sample.Drawn:
    case = suite.Case("small", (2, 4, 9, 11), 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2)
    return sample.Drawn(case, "fprop", "fp32", "nchw")


@pytest.mark.parametrize(("ours_ms", "passed"), [(1.0, True), (1.12, False)])
def test_a_slower_problem_fails_the_sample(tmp_path, monkeypatch, ours_ms: float, passed: bool) -> None:
    real = bench_suite.try_step
    monkeypatch.setattr(
        bench_suite, "try_step", lambda *args: replace(real(*args), aten_ms=1.0, haloconv_ms=ours_ms, family="direct")
    )
    console = Console(width=132, file=io.StringIO())
    assert bench_suite.bench_sample([small()] * 2, QUICK, CPU, tmp_path, console) is passed
    told = console.file.getvalue()
    assert ("SLOWER small fprop fp32 nchw: 0.89" in told) is not passed
    assert f"{0 if passed else 2} of 2 problems below 0.9" in told
    (path,) = tmp_path.glob("*-sample.jsonl")
    assert len(path.read_text().splitlines()) == 2


def test_the_slowest_comes_first() -> None:
    row = trial.try_step(small().case.layer("fp32", "nchw", "auto", CPU), "fprop", replace(QUICK, min_runs=0))
    rows = [replace(row, aten_ms=1.0, haloconv_ms=ms) for ms in (1.0, 1.2, 2.0)] + [row]
    assert [each.haloconv_ms for each in sample.slower(rows)] == [2.0, 1.2]
