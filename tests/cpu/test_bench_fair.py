"""What keeps rows of ``haloconv bench`` honest: times that cannot be are failures, and PyTorch runs at its best."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from haloconv import reference
from haloconv.bench import suite, trial
from haloconv.bench.cut_layer import CutLayer
from haloconv.bench.layer import Layer
from haloconv.choose.choice import Choice
from haloconv.families.base import Config
from haloconv.problem import Problem
from haloconv.reference import cudnn_search
from haloconv.roofline import limit_ms, needed_flops
from haloconv.tune import timing
from haloconv.tune.baseline import apart
from tests.cpu.test_bench import CPU, QUICK, SMALL, SUITE
from tests.cpu.test_report import WIN

H200 = "NVIDIA H200"


def timed(family: str, ms: float, precision: str = "fp16") -> tuple[trial.Row, list[Problem]]:
    """A row of layer A in that time, and its problem."""
    case = suite.load_suite(SUITE)[0]
    problem = case.problem("fprop", precision, "nhwc")
    row = replace(WIN, case="A", family=family, precision=precision, haloconv_ms=ms, limit_ms=limit_ms(problem, H200))
    return row, [problem]


@pytest.mark.parametrize("precision, sheet", [("fp32", 67e12), ("tf32", 495e12), ("fp16", 990e12), ("bf16", 990e12)])
def test_a_time_below_the_data_sheet_is_a_failure(precision, sheet):
    """Of our kernels; a time between the measured ceiling and the sheet asks for another measurement of it."""
    _, (problem,) = timed("direct", 1.0, precision)
    least = needed_flops(problem) / sheet * 1e3
    row, problems = timed("direct", 0.999 * least, precision)
    assert "of the data sheet: the measurement is wrong" in trial.too_fast(row, problems, H200)
    row, _ = timed("direct", 1.001 * least, precision)
    assert trial.too_fast(row, problems, H200) is None
    assert "A fprop" in trial.above_the_ceiling(row) and "measure the ceilings again" in trial.above_the_ceiling(row)
    assert trial.above_the_ceiling(replace(row, haloconv_ms=row.limit_ms)) is None
    assert trial.too_fast(row, problems, None) is None and trial.too_fast(row, problems, "Some other GPU") is None


def test_pytorch_may_multiply_less_but_moves_all_bytes():
    _, (problem,) = timed("aten", 1.0)
    memory = problem.bytes / 4.8e12 * 1e3
    row, problems = timed("aten", 1.001 * memory)
    assert trial.too_fast(row, problems, H200) is None and trial.above_the_ceiling(row) is None
    assert trial.too_fast(replace(row, family="direct"), problems, H200) is not None
    assert trial.too_fast(replace(row, haloconv_ms=0.999 * memory), problems, H200) is not None


def test_a_step_is_held_to_its_three_directions():
    row, (problem,) = timed("direct", 1.0)
    three = [problem.toward(direction) for direction in ("fprop", "dgrad", "wgrad")]
    one_ms = needed_flops(problem) / 990e12 * 1e3
    assert trial.too_fast(replace(row, haloconv_ms=2.9 * one_ms), three, H200) is not None
    assert trial.too_fast(replace(row, haloconv_ms=3.1 * one_ms), three, H200) is None


def test_a_bias_gradient_is_held_to_reading_dy():
    """And not to the layer's convolution, which takes longer."""
    row, problems = timed("reduce", 1.0)
    read = replace(row, direction="bgrad", bytes=48_000_000)
    assert trial.too_fast(replace(read, haloconv_ms=0.0101), problems, H200) is None
    assert trial.too_fast(replace(read, haloconv_ms=0.0099), problems, H200) is not None
    layer = replace(SMALL.layer("fp32", "nchw", "aten", CPU), b=torch.zeros(SMALL.filters))
    assert trial.try_step(layer, "bgrad", QUICK).bytes == layer.dy.nbytes


def test_a_time_too_fast_fails_its_row(monkeypatch):
    monkeypatch.setattr(trial, "too_fast", lambda row, problems, gpu: f"{len(problems)} too fast")
    layer = SMALL.layer("fp32", "nchw", "aten", CPU)
    assert trial.try_step(layer, "fprop", QUICK).complaint == "1 too fast"
    assert trial.try_training_step(layer, QUICK).complaint == "3 too fast"


# --- PyTorch at its best


class Raced:
    """A layer whose calls are only names; it says that it lies on a GPU. ``ours`` is what runs on our side."""

    x = SimpleNamespace(device=torch.device("cuda", 0))

    def __init__(self, layout="nchw", ours="direct", again=""):
        self.layout, self.family, self.again = layout, ours, again

    def with_layout(self, layout):
        return Raced(layout, self.family)

    def elsewhere(self):
        return Raced(self.layout, self.family, " again")

    def searches(self, step):
        return step != "bgrad" and self.family == "aten"

    def baseline(self, step):
        return f"aten {self.layout}{self.again}"

    def timed(self, step):
        return f"ours{self.again}"


@pytest.mark.parametrize("family", ["direct", "aten"])
@pytest.mark.parametrize(
    "step, other, calls",
    [
        ("fprop", True, ["aten nchw", "aten nhwc", "ours", "aten nchw again", "aten nhwc again"]),
        ("wgrad", False, ["aten nchw", "ours", "aten nchw again"]),
        ("bgrad", True, ["aten nchw", "ours"]),
    ],
)
def test_on_a_gpu_pytorch_searches_twice_in_each_layout(monkeypatch, step, other, calls, family):
    """And on our side, where it runs there: of every side the better search counts."""
    seen = {}
    expected = [*calls, "ours again"] if family == "aten" and step != "bgrad" else calls

    def compare(variants, **options):
        seen.update(variants=list(variants.values()), **options)
        return {name: timing.Timing(float(i + 1), 0.0, 9) for i, name in enumerate(reversed(variants))}

    monkeypatch.setattr(trial, "compare", compare)
    budget = replace(QUICK, other_layout=other, settle_s=1.0)
    row = trial.measured(trial._timings(Raced(ours=family), step, budget))
    assert seen["variants"] == expected and seen["settle_s"] == 1.0
    times = dict(zip(expected, range(len(expected), 0, -1), strict=True))
    assert row["aten_ms"] == min(times[each] for each in expected if each.startswith("aten nchw"))
    assert row["haloconv_ms"] == min(times[each] for each in expected if each.startswith("ours"))
    least = min(times[each] for each in expected if each.startswith("aten"))
    assert row["aten_best_ms"] == (least if other and step == "fprop" else None)


class OwnKernel(Layer):
    """A layer on whose side PyTorch runs nothing."""

    def choice(self, step):
        return Choice("direct", "for this test")

    def ran(self, step):
        return Config("direct/direct")

    def ours(self, step):
        right = reference.oracle_fprop(self.x, self.w, self.b, self.spec).value.to(self.x.dtype)
        return right.clone


def by_search(plans):
    """A stand-in for the clock: a call costs by the searches whose plans PyTorch's convolution runs in it.

    ``plans`` has the ms of the first search and of the second, which is for operands at another alignment, and those
    of a call that does not convolve by PyTorch.
    """
    convolve, used = torch.conv2d, []

    def conv2d(x, *others):
        used.append(plans["again" if x.data_ptr() % 32 == 16 else "first"])
        return convolve(x, *others)

    def compare(variants, **options):
        found = {}
        for name, call in variants.items():
            used.clear()
            call()
            found[name] = timing.Timing(sum(used) if used else plans["kernel"], 0.0, 9)
        return found

    return conv2d, compare


@pytest.mark.parametrize("again, faster", [(0.7, 0.7), (1.3, 1.0)])
def test_both_sides_run_on_the_better_search(monkeypatch, again, faster):
    """PyTorch against itself is as fast, whichever search found more; a kernel is held to the better one."""
    conv2d, compare = by_search({"first": 1.0, "again": again, "kernel": 0.8})
    monkeypatch.setattr(torch, "conv2d", conv2d)
    monkeypatch.setattr(trial, "compare", compare)
    monkeypatch.setattr(trial, "_searches", lambda device: True)
    layer = SMALL.layer("fp32", "nchw", "aten", CPU)
    row = trial.try_step(layer, "fprop", QUICK)
    assert (row.family, row.haloconv_ms, row.aten_ms, row.ratio) == ("aten", faster, faster, 1.0)
    own = OwnKernel(**{field.name: getattr(layer, field.name) for field in fields(Layer)})
    row = trial.try_step(own, "fprop", QUICK)
    assert (row.complaint, row.haloconv_ms, row.aten_ms) == (None, 0.8, faster)
    assert row.ratio == pytest.approx(faster / 0.8)


def test_what_is_cut_may_be_pytorchs_in_part(monkeypatch):
    """Its pieces are chosen each by itself; a layer that is not cut is one choice. A sum is searched for by nobody."""
    layer = SMALL.layer("fp32", "nchw", "aten", CPU)
    given = {field.name: getattr(layer, field.name) for field in fields(Layer)}
    assert layer.searches("fprop") and not layer.searches("bgrad") and not OwnKernel(**given).searches("wgrad")
    monkeypatch.setattr(Layer, "choice", lambda self, step: Choice("direct", "for this test"))
    for more, cut in (({}, False), ({"shards": 2}, True), ({"modes": ("circular", "circular")}, True)):
        assert CutLayer(**given, **more).searches("wgrad") == cut
        assert not CutLayer(**given, **more).searches("bgrad")


def test_the_second_search_is_for_copies_at_another_alignment():
    layer = SMALL.layer("fp32", "nhwc", "aten", CPU)
    for step in layer.steps:
        assert torch.equal(layer.elsewhere().baseline(step)(), layer.baseline(step)())
    assert layer.elsewhere().x.data_ptr() % 32 == 16 and layer.elsewhere().w.data_ptr() % 32 == 16
    sliced = torch.arange(48.0).reshape(2, 2, 3, 4)[:, :, 1:, ::2]
    for tensor in (layer.x, sliced, sliced.expand(2, 2, 2, 2)):
        copy = apart(tensor)
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.data_ptr() % 32 == 16 and copy.data_ptr() != tensor.data_ptr()
    expanded = torch.zeros(1, 2, 1, 1).expand(3, 2, 4, 4)
    assert apart(expanded) is expanded


def test_all_plans_are_searched(monkeypatch):
    limits = [10]
    monkeypatch.setattr(torch._C, "_cuda_get_cudnn_benchmark_limit", lambda: limits[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_set_cudnn_benchmark_limit", limits.append, raising=False)
    with cudnn_search(True):
        assert limits[-1] == 0 and torch._C._get_cudnn_benchmark()
    assert limits == [10, 0, 10]
