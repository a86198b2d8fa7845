"""The timing protocol: order of events, interleaving, medians, stopping rules; and the limits of the GPUs."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

from haloconv import roofline as limits
from haloconv.problem import Problem
from haloconv.tune import timing

CPU = torch.device("cpu")


def test_variants_take_turns():
    order = []
    variants = {name: lambda name=name: order.append(name) for name in "ABC"}
    timings = timing.compare(variants, device=CPU, budget_s=0.0, min_runs=4)
    assert order == list("ABC") * 5  # one turn warms up
    assert [timings[name].runs for name in "ABC"] == [4, 4, 4]


def test_times_are_those_of_the_calls():
    timings = timing.compare(
        {"slow": lambda: time.sleep(0.02), "fast": lambda: time.sleep(0.002)}, device=CPU, budget_s=0.0, min_runs=5
    )
    assert 20 <= timings["slow"].ms < 40
    assert 2 <= timings["fast"].ms < 12


def test_budget_extends_the_runs_and_progress_ends_at_one():
    shares = []
    timings = timing.compare(
        {"A": lambda: time.sleep(0.001)}, device=CPU, budget_s=0.1, min_runs=2, on_progress=shares.append
    )
    assert timings["A"].runs > 10
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("variants, min_runs", [({}, 10), ({"A": lambda: None}, 0)])
def test_nothing_to_time_is_an_error(variants, min_runs):
    with pytest.raises(ValueError, match="needs a variant and a run"):
        timing.compare(variants, device=CPU, min_runs=min_runs)


def test_a_failing_variant_raises():
    def fail():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        timing.compare({"A": fail}, device=CPU)


def test_summary_is_median_and_spread():
    summary = timing.summarise([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert summary == timing.Timing(ms=3.5, spread=pytest.approx((5.0 - 2.0) / 3.5), runs=6)
    with pytest.raises(ValueError, match="no times"):
        timing.summarise([])


def test_host_cost_is_in_microseconds_per_call():
    assert 1000 <= timing.host_cost(lambda: time.sleep(0.001), repeats=5, rounds=3, device=CPU) < 3000


class FakeEvent:
    log: list[str] = []
    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        self.time = None

    def record(self):
        FakeEvent.log.append("event")
        self.time = FakeEvent.clock

    def elapsed_time(self, end):
        return end.time - self.time


@pytest.fixture
def fake_gpu(monkeypatch):
    """A device that records what is enqueued; a call advances its clock by what the test says."""
    log = FakeEvent.log = []
    FakeEvent.clock = 0.0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1024))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    clock = timing._CudaClock(CPU)
    assert clock.buffer.nbytes == 2048
    clock.buffer = SimpleNamespace(zero_=lambda: log.append("flush"))
    return clock


def call_of(name: str, ms: float):
    def call():
        FakeEvent.log.append(name)
        FakeEvent.clock += ms

    return call


def test_gpu_round_flushes_outside_the_events_and_waits_once(fake_gpu):
    calls = [call_of("A", 3.0), call_of("B", 5.0)]
    fake_gpu.turns = 2
    FakeEvent.log.clear()
    times = fake_gpu.round(calls)
    turn = ["flush", "event", "A", "event", "flush", "event", "B", "event"]
    assert FakeEvent.log == ["wait", "sleep", *turn, *turn, "wait"]
    assert times == [[3.0, 3.0], [5.0, 5.0]]


def test_calls_of_many_launches_get_a_sleeping_kernel_each(fake_gpu):
    """Behind one, those that no longer fit into the driver's queue would be timed at the host's pace."""
    calls = [call_of("A", 3.0), call_of("B", 5.0)]
    fake_gpu.turns, fake_gpu.host_ms = 2, timing.LONG_TURN_HOST_MS + 0.1
    FakeEvent.log.clear()
    times = fake_gpu.round(calls)
    alone = [["wait", "sleep", "flush", "event", name, "event", "wait"] for name in "ABAB"]
    assert FakeEvent.log == sum(alone, []) and times == [[3.0, 3.0], [5.0, 5.0]]


def test_calls_of_many_launches_are_timed_as_graphs_if_all_can_be_captured(fake_gpu, monkeypatch):
    slow, replays = [lambda: time.sleep(0.002)] * 2, [call_of("A", 3.0), call_of("B", 5.0)]
    monkeypatch.setattr(timing, "captured", lambda calls, device: replays)
    assert fake_gpu.warm_up(slow) is replays and fake_gpu.host_ms < timing.LONG_TURN_HOST_MS
    monkeypatch.setattr(timing, "captured", lambda calls, device: None)
    assert fake_gpu.warm_up(slow) is slow and fake_gpu.host_ms > timing.LONG_TURN_HOST_MS
    monkeypatch.setattr(timing, "captured", None)
    quick = [call_of("A", 3.0)]
    assert fake_gpu.warm_up(quick) is quick


def test_gpu_rounds_are_bounded(fake_gpu, monkeypatch):
    monkeypatch.setattr(timing, "captured", lambda calls, device: None)
    fake_gpu.warm_up([call_of("A", 0.001), call_of("B", 0.001)])
    assert 1 <= fake_gpu.turns <= timing.MAX_RUNS_PER_ROUND // 2
    fake_gpu.warm_up([lambda: time.sleep(0.08), call_of("B", 0.001)])
    assert fake_gpu.turns == 1
    assert fake_gpu.host_ms >= 80


def test_limit_is_the_larger_of_arithmetic_and_memory():
    h200 = "NVIDIA H200"
    a = Problem("fprop", 8, 32, 512, 512, 64, 5, 9, padding=(2, 2, 4, 4), dilation=(2, 3))
    assert limits.limit_ms(a, h200) == pytest.approx(a.flops / 51e12 * 1e3)
    depthwise = Problem("fprop", 64, 96, 56, 56, 96, 1, 1, groups=96, dtype=torch.float16)
    assert limits.limit_ms(depthwise, h200) == pytest.approx(2 * 64 * 96 * 56 * 56 * 2 / 4.3e12 * 1e3, rel=1e-4)
    assert limits.limit_ms(depthwise, h200) == limits.memory_limit_ms(depthwise, h200)


def test_unknown_gpu_or_precision_has_no_limit():
    problem = Problem("fprop", 1, 1, 8, 8, 1, 3, 3, dtype=torch.float64)
    assert limits.limit_ms(problem, "NVIDIA H200") is None
    assert limits.memory_limit_ms(problem, "NVIDIA H200") > 0
    assert limits.limit_ms(problem, "Some other GPU") is None
    assert limits.memory_limit_ms(problem, "Some other GPU") is None


@pytest.mark.parametrize("label, ms", [("tf32", 0.89), ("fp32", 7.28), ("fp16", 0.478), ("bf16", 0.462)])
def test_limits_of_layer_a(label, ms):
    """The figures that the measured table of layer A is judged by."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(label, torch.float32)
    precision = "tf32" if label == "tf32" else "ieee"
    a = Problem(
        "fprop", 8, 32, 512, 512, 64, 5, 9, padding=(2, 2, 4, 4), dilation=(2, 3), dtype=dtype, precision=precision
    )
    assert limits.limit_ms(a, "NVIDIA H200 NVL") == pytest.approx(ms, rel=0.01)
