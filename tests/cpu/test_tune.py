"""Choosing by measurement, with fake families and a fake clock: what is timed, what wins, and what plans make of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import haloconv
from haloconv import env, plan
from haloconv.choose import records
from haloconv.choose.buckets import bucket_of
from haloconv.choose.choice import Choice, choose, recorded
from haloconv.choose.records import read_records, records_path, shelf_of, write_records
from haloconv.device import set_stand_in
from haloconv.problem import Problem, dense_request
from haloconv.tune import first_use as at_first_use
from haloconv.tune import measure
from tests.tuned import (
    FACTS,
    LAYER,
    Clock,
    FakeConfig,
    FakeFamily,
    fake_device,
    fake_gpu,
    favouring,
    forget,
    only,
    record,
)

CPU = torch.device("cpu")
NCHW = replace(LAYER, dtype=torch.float32)


@pytest.fixture(autouse=True)
def device(tmp_path: Path) -> Iterator[None]:
    with fake_gpu(tmp_path):
        yield


@pytest.fixture
def special() -> Iterator[FakeFamily]:
    """Beside it a direct that is never measured: it offers nothing."""
    family = FakeFamily("special")
    with only(FakeFamily("direct", ()), family):
        yield family


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(favouring("special"))
    monkeypatch.setattr(measure, "compare", made)
    return made


@pytest.fixture
def first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNE, "first-use")
    env.tunes_at_first_use.cache_clear()


def measured(problem: Problem = LAYER) -> measure.Outcome:
    (entry,) = measure.prepared([problem], CPU)
    return measure.measure(entry)


def layer_and_input(h: int = 24, w: int = 28) -> tuple[haloconv.Conv2d, torch.Tensor]:
    torch.manual_seed(0)
    return haloconv.Conv2d(8, 16, 3, padding=1, bias=False), torch.randn(2, 8, h, w)


def conv(h: int = 24, w: int = 28) -> haloconv.Conv2d:
    """A layer that has run once without a graph, so that its repr says on what."""
    layer, x = layer_and_input(h, w)
    with torch.no_grad():
        layer(x)
    return layer


# --- measuring one problem


def test_the_fastest_right_candidate_is_chosen(special: FakeFamily, clock: Clock) -> None:
    clock.ms_of = lambda name: {"aten": 1.0, "special (rows4)": 0.6, "special (rows8)": 0.4}.get(name, 2.0)
    outcome = measured()
    assert (outcome.record.family, outcome.record.config, outcome.record.ratio) == ("special", "rows8", 2.5)
    assert outcome.record.error <= outcome.record.error_limit == 1e-3 and not outcome.rejected
    assert all(names[0] == "aten" for names in clock.rounds), "PyTorch takes part in every measurement"
    assert set(clock.rounds[0]) == {"aten", "special (rows4)", "special (rows8)"}
    assert clock.rounds[-1] == ("aten", "special (rows8)"), "those far behind are timed a few times only"


@pytest.mark.parametrize(("ms", "family"), [(1.0, "aten"), (0.98, "aten"), (1 / 1.029, "aten"), (1 / 1.031, "special")])
def test_ties_and_little_go_to_pytorch(special: FakeFamily, clock: Clock, ms: float, family: str) -> None:
    clock.ms_of = favouring("special", ms)
    found = measured().record
    assert found.family == family and found.own == "special/fake"
    assert found.ms == pytest.approx(1.0 if family == "aten" else ms, rel=1e-4)


@pytest.mark.parametrize(("direction", "family"), [("fprop", "special"), ("dgrad", "aten"), ("wgrad", "aten")])
def test_a_gradient_that_gains_less_than_it_costs_the_host_goes_to_pytorch(
    special: FakeFamily, clock: Clock, direction: str, family: str
) -> None:
    clock.ms_of = lambda name: 0.0100 if name == "aten" else 0.0061
    assert measured(replace(LAYER, direction=direction)).record.family == family


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("fault", ["wrong", "nan", "does not bind", "does not run"])
def test_what_is_not_right_is_never_timed(special: FakeFamily, clock: Clock, fault: str, direction: str) -> None:
    special.offers = (FakeConfig(4, fault), FakeConfig(8))
    clock.ms_of = lambda name: 0.1 if "rows4" in name else 1.0 if name == "aten" else 0.5
    outcome = measured(replace(LAYER, direction=direction, dtype=torch.float32))
    assert (outcome.record.family, outcome.record.config) == ("special", "rows8")
    assert not any("rows4" in name for names in clock.rounds for name in names)
    assert len(outcome.rejected) == 1 and "rows4" in outcome.rejected[0]


def test_with_nothing_right_pytorch_runs(special: FakeFamily, clock: Clock) -> None:
    special.offers = (FakeConfig(4, "wrong"),)
    outcome = measured()
    assert outcome.record.family == "aten" and outcome.record.own is None and outcome.record.ratio is None


def test_a_candidate_that_goes_wrong_while_it_is_timed_loses(special: FakeFamily, clock: Clock) -> None:
    special.offers = (FakeConfig(4),)
    (entry,) = measure.prepared([LAYER], CPU)
    (own,) = (each for each in entry.bound if each is not measure.ATEN)
    run, calls = entry.bound[own], []

    def worsening(*args: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return run(*args) * (1.0 if len(calls) < 3 else 2.0)

    entry.bound[own] = worsening
    outcome = measure.measure(entry)
    assert outcome.record.family == "aten" and "after timing" in outcome.rejected[0]


def test_tensor_cores_are_not_tried_on_one_channel(special: FakeFamily) -> None:
    depthwise = replace(LAYER, c=16, groups=16)
    wasteful, made_for_it = FakeFamily("wasteful", tensor_cores=True), FakeFamily("made_for_it", tensor_cores=True)
    made_for_it.depthwise = True

    def families(problem: Problem) -> set[str]:
        return {each.family for each in measure.candidates(dense_request(problem, CPU))}

    with only(special, wasteful, made_for_it):
        assert families(depthwise) == {"aten", "special", "made_for_it"}
        assert families(LAYER) == {"aten", "special", "made_for_it", "wasteful"}


def test_directions_and_precisions_are_measured_apart(special: FakeFamily, clock: Clock) -> None:
    fp16 = measured(LAYER).record
    shelf_of(FACTS).keep([fp16, measured(replace(LAYER, direction="dgrad")).record])
    found = choose(LAYER, CPU)
    assert (found.kernel, found.config) == ("special/fake", "rows4") and choose(LAYER.toward("dgrad"), CPU).measured
    assert not choose(LAYER.toward("wgrad"), CPU).measured
    assert not choose(replace(LAYER, dtype=torch.bfloat16), CPU).measured


# --- what plans make of records


def test_a_plan_follows_its_record(special: FakeFamily) -> None:
    tf32 = replace(NCHW, precision="tf32")
    write_records(records_path(FACTS.name), [record(tf32, "special", config="rows8")], FACTS)
    layer = conv()
    assert special.bound == [FakeConfig(8)]
    assert "-> special (tuned: 2.00x PyTorch on 2026-01-02, Test GPU 9000)" in repr(layer)


def test_a_record_of_pytorch_is_followed_too(special: FakeFamily) -> None:
    assert choose(LAYER, CPU).family == "special"
    shelf_of(FACTS).add([record(family="aten", own_ms=1.0)])
    found = choose(LAYER, CPU)
    assert found.family == "aten" and "reaches 1.00x" in found.reason


def test_a_config_that_another_size_does_not_offer_gives_way_to_the_model(special: FakeFamily) -> None:
    special.offers = (FakeConfig(5), FakeConfig(8))
    tf32 = replace(NCHW, precision="tf32")
    shelf_of(FACTS).add([record(tf32, "special", config="rows8")])
    carried = replace(tf32, h=25)
    assert bucket_of(carried) == bucket_of(tf32)
    conv(25, 28)
    assert special.bound == [FakeConfig(5)], "rows8 does not divide 25 rows"
    conv(24, 28)
    assert special.bound == [FakeConfig(5), FakeConfig(8)]


def test_a_family_that_no_longer_takes_the_problem_gives_way(special: FakeFamily) -> None:
    shelf_of(FACTS).add([record(family="special")])
    special.takes = lambda problem: False
    assert choose(LAYER, CPU).family == "direct" and not choose(LAYER, CPU).measured


def test_a_family_asked_for_by_name_runs_whatever_records_say(special: FakeFamily) -> None:
    shelf_of(FACTS).add([record(family="special")])
    assert choose(LAYER, CPU, "direct") == Choice("direct", "asked for")


def test_warm_calls_ask_nobody(special: FakeFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(x)

        def asked(*_: object) -> None:
            raise AssertionError("a warm call asked for its choice")

        for name in ("choose", "choose_now", "config_of", "may_be_measured"):
            monkeypatch.setattr(plan, name, asked)
        monkeypatch.setattr(records, "read_records", asked)
        layer(x)


def test_files_are_read_once(special: FakeFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    special.offers = (FakeConfig(1),)
    reads: list[Path] = []
    read = records.read_records
    monkeypatch.setattr(records, "read_records", lambda path: [reads.append(path), read(path)][1])
    for size in range(20, 30):
        conv(size, size)
    assert len(reads) == 2, "the user's file and the shipped one"


def test_without_a_gpu_there_are_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stand_in(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recorded(LAYER, torch.device("cuda", 0)) is None and recorded(LAYER, CPU) is None


# --- at first use


def test_nothing_is_measured_unless_asked_for(special: FakeFamily, clock: Clock) -> None:
    layer, x = layer_and_input()
    layer(x.requires_grad_()).sum().backward()
    assert not clock.rounds


def test_first_use_measures_each_direction_once(special: FakeFamily, clock: Clock, first_use: None) -> None:
    layer, x = layer_and_input()
    dy = torch.ones(2, 16, 24, 28)
    for _ in range(2):
        layer(x.requires_grad_()).backward(dy)
    kept = read_records(records_path(FACTS.name))
    assert sorted(each.layer.split(" ")[0] for each in kept) == ["dgrad", "fprop", "wgrad"]
    rounds = len(clock.rounds)
    forget()
    layer(x).backward(dy)
    assert len(clock.rounds) == rounds, "another process finds the records"
    assert "tuned: 2.00x PyTorch" in repr(layer)


def test_200_image_sizes_are_not_200_measurements(special: FakeFamily, clock: Clock, first_use: None) -> None:
    special.offers = (FakeConfig(1),)
    rng, layer = random.Random(1), layer_and_input()[0]
    sizes = [(rng.randint(16, 31), rng.randint(16, 31)) for _ in range(200)]
    with torch.no_grad():
        for h, w in sizes:
            layer(torch.zeros(1, 8, h, w))
        kept = read_records(records_path(FACTS.name))
        assert len(set(sizes)) > 100 and len(kept) <= 3
        before = len(clock.rounds)
        for h, w in sizes:
            layer(torch.zeros(1, 8, h + 1 if h < 31 else h, w))
    assert len(clock.rounds) == before


@pytest.mark.parametrize(
    ("obstacle", "says"),
    [("is_capturing", "CUDA graph is captured"), ("in_a_group", "haloconv.tune")],
)
def test_first_use_waits_where_it_must_not_measure(
    special: FakeFamily, clock: Clock, first_use: None, monkeypatch: pytest.MonkeyPatch, obstacle: str, says: str
) -> None:
    monkeypatch.setattr(at_first_use, obstacle, lambda *_: True)
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(x)
        (made,) = plan._plans.values()
    assert not clock.rounds and made.choice.family == "special" and says in made.choice.reason
    monkeypatch.setattr(at_first_use, obstacle, lambda *_: False)
    plan.clear_plans()
    layer(x)
    assert clock.rounds


def test_an_emulator_times_nothing_at_first_use(special: FakeFamily, clock: Clock, first_use: None) -> None:
    set_stand_in(fake_device()._replace(keeps_time=False))
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(x)
    (made,) = plan._plans.values()
    assert not clock.rounds and "emulator" in made.choice.reason


def test_first_use_leaves_odd_tensors_to_the_rules(special: FakeFamily, clock: Clock, first_use: None) -> None:
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(torch.empty(2, 8, 24, 56)[..., ::2].copy_(x))
        (made,) = plan._plans.values()
        assert not clock.rounds and "not dense" in made.choice.reason
        layer(x)
    assert clock.rounds


def test_first_use_measures_layers_that_are_native(special: FakeFamily, clock: Clock, first_use: None) -> None:
    """What PyTorch would run whole, by the rules, is measured in every direction all the same."""
    special.takes = lambda problem: problem.direction == "wgrad"
    layer, x = layer_and_input()
    layer(x).backward(torch.ones(2, 16, 24, 28))
    assert {each.layer.split(" ")[0] for each in read_records(records_path(FACTS.name))} == {"fprop", "wgrad"}


def test_without_memory_first_use_follows_the_rules(
    special: FakeFamily, first_use: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def short(*_: object) -> None:
        tried.append(1)
        raise torch.cuda.OutOfMemoryError("short")

    monkeypatch.setattr(at_first_use, "measure", short)
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(x)
        plan.clear_plans()
        layer(x)
        (made,) = plan._plans.values()
    assert len(tried) == 1 and "no memory" in made.choice.reason


def test_frozen_measures_and_writes_nothing(
    special: FakeFamily, clock: Clock, first_use: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.FROZEN, "1")
    forget()
    layer, x = layer_and_input()
    layer(x.requires_grad_()).sum().backward()
    report = haloconv.tune(layer, x, progress=False)
    assert not clock.rounds and not records_path(FACTS.name).parent.exists()
    assert any(env.FROZEN in note for note in report.notes)


def test_a_meaningless_mode_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNE, "always")
    env.tunes_at_first_use.cache_clear()
    with pytest.warns(RuntimeWarning, match="first-use or off"):
        assert not env.tunes_at_first_use()
