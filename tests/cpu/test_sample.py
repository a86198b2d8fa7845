"""The random sample of ``haloconv bench --sample``: which problems it draws, and what it makes of their times."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from haloconv.bench import sample, suite, trial
from haloconv.bench.layer import LAYOUTS
from haloconv.cli import app
from haloconv.cli.bench import command as bench_verb
from haloconv.cli.bench import suite as bench_suite
from haloconv.env import environment_stamp
from haloconv.problem import DIRECTIONS
from haloconv.report import Row
from tools import judge_rules
from tools import measured as measured_tool

CPU = torch.device("cpu")
QUICK = trial.Budget(seconds=0.0, min_runs=2)


def test_the_same_seed_draws_the_same_problems() -> None:
    assert sample.sample(30, 7) == sample.sample(30, 7)
    assert sample.sample(30, 7) != sample.sample(30, 8)
    assert sample.sample(30, 7)[:10] == sample.sample(10, 7)


def test_a_hundred_problems_have_every_kind_direction_precision_and_layout() -> None:
    drawn = sample.sample(100, 0)
    assert {each.case.name.split()[0] for each in drawn} == {"depthwise", "grouped", "stem", "dense", "network"}
    assert {each.direction for each in drawn} == set(DIRECTIONS)
    assert {each.precision for each in drawn} == set(suite.PRECISIONS) - {"tf32x3", "fp64"}
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


def test_dense_layers_are_pointwise_and_strided_ones_too() -> None:
    cases = [each.case for each in sample.sample(300, 1)]
    dense = [case for case in cases if case.groups == 1 and case.name.split()[0] in ("dense", "network")]
    assert len(dense) > 120
    pointwise = [case for case in dense if case.filter == (1, 1)]
    assert len(pointwise) > 30 and sum(max(case.stride) > 1 for case in dense) > 20
    assert any(max(case.dilation) > 1 for case in dense) and any(case.filter[0] != case.filter[1] for case in dense)


def test_layers_of_networks_are_read_off_the_tables() -> None:
    """Every network of the tables, and each of its layers, which say where they come from."""
    entries = [json.loads(line) for line in sample.LAYERS.read_text(encoding="utf-8").splitlines()]
    assert {entry["origin"].split()[0] for entry in entries} == {
        "timm", "torchvision", "segmentation-models-pytorch", "diffusers",
    }  # fmt: skip
    assert {entry["kind"] for entry in entries} == {"classification", "segmentation", "diffusion U-Net", "VAE"}
    layers = {name for entry in entries for name in entry["layers"]}
    assert len(layers) > 500 and all(count > 0 for entry in entries for count in entry["layers"].values())
    for name in layers:
        case = sample.read_case(f"network {name}")
        assert sample.name_of_layer(case) == name and case.problem("fprop", "fp32", "nchw").p > 0
    drawn = [each.case for each in sample.sample(200, 5) if each.case.name.startswith("network ")]
    known = {sample.name_of_layer(replace(case, input=(1, *case.input[1:]))) for case in drawn}
    assert len(drawn) > 50 and known <= layers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What each next row says of PyTorch's time is 1 ms, and of ours what is first in this list."""
    times: list[float] = []
    real = bench_suite.try_step

    def timed(*args: object) -> Row:
        return replace(real(*args), aten_ms=1.0, haloconv_ms=times.pop(0), family="direct")

    monkeypatch.setattr(bench_suite, "try_step", timed)
    return times


def others(count: int) -> list[sample.Drawn]:
    return [
        sample.Drawn(replace(small().case, name=f"small{n}", input=(n, 4, 9, 11)), "fprop", "fp32", "nchw")
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize(("ours_ms", "passed"), [(1.0, True), (1.12, False)])
def test_a_slower_problem_fails_the_sample(tmp_path, clock: list[float], ours_ms: float, passed: bool) -> None:
    console = Console(width=132, file=io.StringIO())
    clock += [ours_ms, ours_ms]
    order = bench_suite.SampleOrder([small()] * 2, QUICK)
    assert bench_suite.bench_sample(order, CPU, tmp_path, console) is passed
    told = console.file.getvalue()
    assert ("SLOWER small fprop fp32 nchw: 0.89" in told) is not passed
    assert f"{0 if passed else 2} of 2 below 0.95, 0 below 0.85" in told
    (path,) = tmp_path.glob("*-sample.jsonl")
    assert len(path.read_text().splitlines()) == 2


def test_the_slowest_comes_first(tmp_path, clock: list[float]) -> None:
    console = Console(width=132, file=io.StringIO())
    clock += [1.0, 1.2, 2.0]
    assert not bench_suite.bench_sample(bench_suite.SampleOrder(others(3), QUICK), CPU, tmp_path, console)
    told = console.file.getvalue()
    assert [line.split()[1] for line in told.splitlines() if line.startswith("SLOWER")] == ["small3", "small2"]
    assert "2 of 3 below 0.95, 2 below 0.85" in told


def test_the_next_run_goes_on(tmp_path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stand as soon as they are timed, and count for their own seed and commit alone."""
    console = Console(width=132, file=io.StringIO())
    clock += [1.0, 1.0]
    order = bench_suite.SampleOrder(others(3), QUICK, seed=7)
    with pytest.raises(IndexError):  # the clock has no third time: the run is cut short
        bench_suite.bench_sample(order, CPU, tmp_path, console)
    clock += [1.3]
    assert not bench_suite.bench_sample(order, CPU, tmp_path, console) and not clock
    told = console.file.getvalue()
    assert "--seed 7: 1 of 3 problems to time" in told and "1 of 3 below 0.95, 1 below 0.85" in told
    clock += [1.0, 1.0, 1.0]
    assert bench_suite.bench_sample(replace(order, seed=8), CPU, tmp_path, console) and not clock
    monkeypatch.setattr(bench_suite, "environment_stamp", lambda: {**environment_stamp(), "commit": "another"})
    assert not bench_suite.bench_sample(replace(order, limit_s=0.0), CPU, tmp_path, console)
    assert "LEFT 3 of 3: run it again with --seed 7" in console.file.getvalue()


def test_a_fresh_seed_is_printed_and_may_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    orders: list[bench_suite.SampleOrder] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(bench_verb, "bench_sample", lambda order, *rest: [orders.append(order), True][1])
    for options in ([], [], ["--seed", "5"], ["--limit", "9"], ["--seed", "5", "--precision", "tf32x3"]):
        done = CliRunner().invoke(app, ["bench", "--sample", "4", "--results", str(tmp_path), *options])
        assert done.exit_code == 0, done.output
    fresh, again, given, limited, in_terms = orders
    assert fresh.seed != again.seed and given.seed == 5 and limited.limit_s == 9
    assert given.drawn == sample.sample(4, 5) and fresh.drawn == sample.sample(4, fresh.seed)
    assert in_terms.drawn == sample.sample(4, 5, ["tf32x3"])
    assert {each.problem.precision for each in in_terms.drawn} == {"tf32x3"}


def test_chosen_layers_are_read_as_they_are_told() -> None:
    drawn = sample.sample(40, 3)
    text = "\n".join(["", *(f"  {each}" for each in drawn), ""])
    read = sample.read_drawn(text)
    assert [each.key for each in read] == [each.key for each in drawn]
    assert [each.problem for each in read] == [each.problem for each in drawn]
    for line in ("", str(drawn[0])[:-1], f"{drawn[0]} nchw", "fprop fp32 nchw", "a layer fprop fp32 nchw"):
        with pytest.raises(ValueError, match="no layer|no name"):
            sample.read_drawn(f"{drawn[0]}\n{line or 'nchw'}")


def test_chosen_layers_have_rows_apart(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random layers are judged by their own rows alone; a file says all there is to say of its layers."""
    console = Console(width=132, file=io.StringIO())
    clock += [1.0, 1.3]
    drawn = others(2)
    order = bench_suite.SampleOrder(drawn, QUICK, seed=None)
    assert not bench_suite.bench_sample(order, CPU, tmp_path, console) and not clock
    assert not bench_suite.bench_sample(order, CPU, tmp_path, console)  # nothing is timed again
    told = console.file.getvalue()
    assert "chosen: 0 of 2 problems to time" in told and "1 of 2 below 0.95" in told
    assert [path.name[11:] for path in tmp_path.glob("*.jsonl")] == ["chosen.jsonl"]
    assert not bench_suite.bench_sample(replace(order, drawn=others(3), limit_s=0.0), CPU, tmp_path, console)
    assert "LEFT 1 of 3: run it again\n" in console.file.getvalue()


def test_a_file_of_layers_or_a_count_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[bench_suite.SampleOrder] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(bench_verb, "bench_sample", lambda order, *rest: [orders.append(order), True][1])
    layers, none = tmp_path / "layers.txt", tmp_path / "none.txt"
    layers.write_text(f"{sample.sample(1, 5)[0]}\n")
    none.write_text("nothing of the kind\n")

    def asked(*options: object) -> str:
        done = CliRunner().invoke(app, ["bench", "--results", str(tmp_path), *map(str, options)], color=False)
        return "" if done.exit_code == 0 else done.stderr

    assert not asked("--sample", layers)
    assert orders[0].seed is None and [each.key for each in orders[0].drawn] == [sample.sample(1, 5)[0].key]
    assert "no layer with its direction" in asked("--sample", none)
    assert "are for random layers" in asked("--sample", layers, "--seed", 5)
    assert "are for random layers" in asked("--sample", layers, "--precision", "fp16")
    assert "neither a number" in asked("--sample", tmp_path / "missing") and "neither a number" in asked("--sample", 0)


def test_rules_are_judged_on_draws_that_they_were_not_drawn_from() -> None:
    """The half is the problem's own; nothing of the second half is listed."""
    names = [f"dense {n}x64x56x56 k64 3x3 s1 p1x1 d1 g1 fprop fp32 nchw" for n in range(1, 65)]
    halves = [judge_rules.half_of(name) for name in names]
    assert 20 < halves.count(judge_rules.JUDGED_ON) < 44 and halves == [judge_rules.half_of(name) for name in names]
    told = list(judge_rules.judgment(judge_rules.Draw(name, "rule", 0.8) for name in names))
    drawn = halves.count(judge_rules.DRAWN_FROM)
    assert told[0] == f"drawn from: {drawn} of {drawn} below 0.95, {drawn} below 0.85"
    assert told[2].startswith(f"judged on: {64 - drawn} of {64 - drawn} below 0.95")
    seen = [name for name in names if any(name in line for line in told)]
    assert seen and {judge_rules.half_of(name) for name in seen} == {judge_rules.DRAWN_FROM}


def test_committed_draws_are_judged() -> None:
    """But the few that another kernel would run today: a draw says nothing of what was not there when it was made."""
    found, others = judge_rules.draws(measured_tool.gpus()[0])
    assert (
        len(found) > 90
        and others <= 0.05 * len(found)
        and {"aten", "depthwise has_few_taps"} <= {draw.rule for draw in found}
    )


def test_what_rules_leave_is_told_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of our kernels on which PyTorch runs by rule; neither PyTorch's own rows nor those of a rule."""
    ours, theirs = "stem 8x3x224x224 k64 7x7 s2 p3x3 d1 g1", "dense 8x64x28x28 k64 1x1 s1 p0x0 d1 g1"
    common = {"direction": "fprop", "precision": "fp16", "layout": "nchw", "kernel": "direct/direct"}
    rows = [
        {"case": ours, "family": "halo_sm80", "ratio": 2.0, **common},
        {"case": theirs, "family": "direct", "ratio": 1.2, **common},
        {"case": theirs, "family": "direct", "ratio": 1.4, **common},
        {"case": theirs, "family": "aten", "ratio": 3.0, **common},
    ]
    monkeypatch.setattr(judge_rules, "rows_of", lambda *_: ((row, sample.read_case(str(row["case"]))) for row in rows))
    gpu = next(gpu for gpu in judge_rules.gpus() if gpu["name"] == "NVIDIA H200")
    assert [each.ratio for each in judge_rules.left(gpu)] == [1.4, 1.2]
