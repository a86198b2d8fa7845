"""Tuning on a GPU: what is chosen is right and runs; first use, frozen records, graphs that are being captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import haloconv
from haloconv import env, plan
from haloconv.bench.networks.swapped import Autocast
from haloconv.bench.networks.whole import Contest, _step
from haloconv.choose import records
from haloconv.choose.records import read_records, records_path, write_records
from haloconv.choose.whole import MARGIN
from haloconv.device import device_facts
from haloconv.families import FAMILIES
from haloconv.problem import Direction
from haloconv.tune.problems import problems_of
from haloconv.tune.timing import captured
from tests import oracle
from tests.cases import Case, case, case_id, make
from tests.tuned import forget

DEPTHWISE = case("depthwise", "ConvNeXt", (16, 96, 56, 56), (96, 7, 7), padding=3, groups=96)
STEM = case("stem", "ResNet", (8, 3, 112, 112), (64, 7, 7), padding=3, stride=2)
DENSE = case("dense", "three by three", (8, 64, 56, 56), (64, 3, 3), padding=1)
FPROP: tuple[Direction, ...] = ("fprop",)
NARROW = case("narrow", "PyTorch's by rule", (8, 16, 14, 14), (16, 3, 3), padding=1)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(env.RECORDS_DIR, str(tmp_path / "records"))
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "shipped")
    forget()
    yield
    forget()


def layer_of(one: Case, dtype: torch.dtype = torch.float16) -> tuple[torch.nn.Conv2d, torch.Tensor]:
    n, c, h, w, k, r, s = one.extents
    top, _, left, _ = one.spec.padding
    layer = torch.nn.Conv2d(c, k, (r, s), one.spec.stride, (top, left), groups=one.spec.groups, device="cuda")
    return layer.to(dtype), torch.randn(n, c, h, w, device="cuda", dtype=dtype)


def path_of_records() -> Path:
    return records_path(torch.cuda.get_device_name())


@pytest.mark.parametrize("one", [DEPTHWISE, STEM, DENSE], ids=case_id)
def test_a_tuned_choice_is_right_and_used(one: Case) -> None:
    """Every direction has a row; what it names runs, and its result is right."""
    model, x = layer_of(one)
    x.requires_grad_()
    report = haloconv.tune(torch.nn.Sequential(model), x, budget_s=0.02, progress=False)
    assert report.passed and [row.direction for row in report.rows] == ["fprop", "dgrad", "wgrad"], report.notes
    assert not any("is not right" in note or "cannot be used" in note for note in report.notes), report.notes
    t = make(one, torch.float16, "cuda")
    for row in report.rows:
        assert row.family == "aten" or (row.aten_ms or 0.0) >= MARGIN * (row.haloconv_ms or float("inf"))
        oracle.check(row.direction, oracle.run(row.direction, t, one), t, one.spec)
        (problem,) = (each.problem for each in problems_of(model, x) if each.problem.direction == row.direction)
        found = plan.choose(problem, x.device)
        assert (found.family, found.config) == (row.family, row.config) and found.reason.startswith("tuned: ")
    assert len(read_records(path_of_records())) == 3


def test_depthwise_layers_go_to_our_kernels() -> None:
    model, x = layer_of(DEPTHWISE)
    (row,) = haloconv.tune(model, x, directions=FPROP, budget_s=0.05, progress=False).rows
    assert (
        FAMILIES[row.family].depthwise
        and row.ratio is not None
        and row.ratio > 2
        and (row.roofline_fraction is None or row.roofline_fraction < 1.05)
    )


def test_other_sizes_follow_and_compile_nothing(compiles: Callable[[], int]) -> None:
    model, x = layer_of(DEPTHWISE)
    haloconv.tune(model, x, directions=FPROP, budget_s=0.02, progress=False)
    layer = haloconv.Conv2d.from_torch(model)
    with torch.no_grad():
        layer(x)
        before = compiles()
        for h in range(48, 64, 5):
            image = torch.randn(16, 96, h, 60, device="cuda", dtype=x.dtype)
            torch.testing.assert_close(layer(image), model(image), atol=2e-2, rtol=2e-2)
            assert "measured at 16 x 56 x 56" in repr(layer)
    assert compiles() - before <= 1, "the model's best of another size at most"


def test_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNE, "first-use")
    forget()
    model, x = layer_of(STEM)
    layer = haloconv.Conv2d.from_torch(model)
    y = layer(x.requires_grad_())
    y.backward(torch.randn_like(y))
    kept = read_records(path_of_records())
    assert sorted(each.layer.split(" ")[0] for each in kept) == ["dgrad", "fprop", "wgrad"]
    torch.testing.assert_close(y, model(x), atol=2e-2, rtol=2e-2)
    assert "tuned: " in repr(layer)


def test_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNE, "first-use")
    monkeypatch.setenv(env.FROZEN, "1")
    forget()
    model, x = layer_of(DENSE)
    haloconv.Conv2d.from_torch(model)(x)
    report = haloconv.tune(model, x, progress=False)
    assert not report.rows and any(env.FROZEN in note for note in report.notes)
    assert not path_of_records().parent.exists()


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that was never tuned is captured on what the rules say; afterwards it is measured."""
    monkeypatch.setenv(env.TUNE, "first-use")
    forget()
    model, x = layer_of(NARROW)
    layer = haloconv.Conv2d.from_torch(model)
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        model(x)  # cuDNN's own start
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            y = layer(x)
        graph.replay()
        side.synchronize()
        (made,) = plan._plans.values()
        assert "CUDA graph is captured" in made.choice.reason and not path_of_records().exists()
        torch.testing.assert_close(y, model(x), atol=2e-2, rtol=2e-2)
        plan.clear_plans()
        layer(x)
    assert path_of_records().exists()


def test_a_tuned_layer_is_captured_on_its_choice() -> None:
    model, x = layer_of(DEPTHWISE)
    haloconv.tune(model, x, directions=FPROP, budget_s=0.02, progress=False)
    layer = haloconv.Conv2d.from_torch(model)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, model(x), atol=2e-2, rtol=2e-2)
        (made,) = plan._plans.values()
    assert FAMILIES[made.choice.family].depthwise and made.choice.reason.startswith("tuned: ")


def test_shipped_records_are_looked_at_and_followed() -> None:
    model, x = layer_of(DEPTHWISE)
    haloconv.tune(model, x, directions=FPROP, budget_s=0.02, progress=False)
    facts = device_facts(x.device.index)
    (made,) = read_records(path_of_records())
    path_of_records().unlink()
    write_records(records.shipped_path(facts.name), [made], facts)
    forget()
    problem = problems_of(model, x, FPROP)[0].problem
    found = plan.choose(problem, x.device)
    assert found.family == made.family and found.config == made.config and "as shipped" in found.reason


def test_a_training_step_is_captured_for_timing() -> None:
    """Of PyTorch and of ours, with normalisation, under autocast: a replay does the whole step again."""
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 7, padding=3, groups=32), torch.nn.Conv2d(32, 8, 1),
    ).cuda()  # fmt: skip
    ours = copy.deepcopy(theirs)
    haloconv.accelerate(ours)
    x = torch.randn(4, 3, 56, 56, device="cuda")
    low = torch.bfloat16
    contest = Contest(Autocast(ours, low), Autocast(theirs, low), (x,), "ieee", "bf16", 1e-2)
    steps = [_step(each, contest) for each in (contest.ours, contest.theirs)]
    for step in steps:
        step()
    replays = captured(steps, x.device)
    assert replays is not None
    counters = [each[1].get_buffer("num_batches_tracked") for each in (ours, theirs)]
    seen = [int(each) for each in counters]
    for replay in replays:
        replay()
    assert [int(each) for each in counters] == [count + 1 for count in seen]
    assert captured([lambda: x.sum().item()], x.device) is None
    assert torch.isfinite(ours(x)).all()
