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


def test_variants_alternate():
    order = []
    variants = {name: lambda name=name: order.append(name) for name in "ABC"}
    timings = timing.compare(variants, device=CPU, budget_s=0.0, min_runs=4)
    assert order == list("ABC") * 5  # one call of each warms up
    assert [timings[name].runs for name in "ABC"] == [4, 4, 4]


def test_times_are_those_of_the_calls():
    timings = timing.compare(
        {"slow": lambda: time.sleep(0.02), "fast": lambda: time.sleep(0.002)}, device=CPU, budget_s=0.0, min_runs=5
    )
    assert 20 <= timings["slow"].ms < 40
    assert 2 <= timings["fast"].ms < 12


def test_budget_extends_the_runs_and_progress_ends_at_one():
    parts = []
    timings = timing.compare(
        {"A": lambda: time.sleep(0.001)}, device=CPU, budget_s=0.1, min_runs=2, on_progress=parts.append
    )
    assert timings["A"].runs > 10
    assert parts == sorted(parts) and parts[-1] == 1.0


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


def test_host_cost_is_in_microseconds_per_call(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))

    def call() -> None:
        clock.seconds += 0.001

    assert timing.host_cost(call, repeats=5, rounds=3, device=CPU) == pytest.approx(1000)


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
    fake_gpu.repeats = 2
    FakeEvent.log.clear()
    times = fake_gpu.round(calls)
    once = ["flush", "event", "A", "event", "flush", "event", "B", "event"]
    assert FakeEvent.log == ["wait", "sleep", *once, *once, "wait"]
    assert times == [[3.0, 3.0], [5.0, 5.0]]


def test_calls_of_many_launches_get_a_sleeping_kernel_each(fake_gpu):
    """Behind one, those that no longer fit into the driver's queue would be timed at the host's pace."""
    calls = [call_of("A", 3.0), call_of("B", 5.0)]
    fake_gpu.repeats, fake_gpu.host_ms = 2, timing.LONG_HOST_MS + 0.1
    FakeEvent.log.clear()
    times = fake_gpu.round(calls)
    alone = [["wait", "sleep", "flush", "event", name, "event", "wait"] for name in "ABAB"]
    assert FakeEvent.log == sum(alone, []) and times == [[3.0, 3.0], [5.0, 5.0]]


def test_calls_of_many_launches_are_timed_as_graphs_if_all_can_be_captured(fake_gpu, monkeypatch):
    slow, replays = [lambda: time.sleep(0.002)] * 2, [call_of("A", 3.0), call_of("B", 5.0)]
    monkeypatch.setattr(timing, "captured", lambda calls, device: replays)
    assert fake_gpu.warm_up(slow) is replays and fake_gpu.host_ms < timing.LONG_HOST_MS
    monkeypatch.setattr(timing, "captured", lambda calls, device: None)
    assert fake_gpu.warm_up(slow) is slow and fake_gpu.host_ms > timing.LONG_HOST_MS
    monkeypatch.setattr(timing, "captured", None)
    quick = [call_of("A", 3.0)]
    assert fake_gpu.warm_up(quick) is quick


def test_gpu_rounds_are_bounded(fake_gpu, monkeypatch):
    monkeypatch.setattr(timing, "captured", lambda calls, device: None)
    fake_gpu.warm_up([call_of("A", 0.001), call_of("B", 0.001)])
    assert 1 <= fake_gpu.repeats <= timing.MAX_RUNS_PER_ROUND // 2
    fake_gpu.warm_up([lambda: time.sleep(0.08), call_of("B", 0.001)])
    assert fake_gpu.repeats == 1
    assert fake_gpu.host_ms >= 80


def test_the_clock_settles_before_anything_counts(monkeypatch):
    """For as long as asked for, and until two rounds take about the same; rounds of before are in no median."""
    now = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(now)))
    rounds = iter([5.0, 4.0, 3.0, 2.0, 2.0, 1.99, 1.0, 1.0])
    clock = SimpleNamespace(round=lambda calls: [[next(rounds)]])
    timing._settle(clock, [None], settle_s=2.0)
    assert next(rounds) == 1.99  # two seconds had passed at 3.0, but not settled
    unsettled = iter(float(i) for i in range(1, 100))
    clock = SimpleNamespace(round=lambda calls: [[next(unsettled) * 2]])
    timing._settle(clock, [None], settle_s=2.0)
    assert next(unsettled) == timing.MOST_SETTLING * 2.0 + 1


def test_settling_is_only_for_who_asks():
    counts = {"A": 0}

    def call():
        counts["A"] += 1
        time.sleep(0.001)

    timing.compare({"A": call}, device=CPU, budget_s=0.0, min_runs=2)
    assert counts["A"] == 3
    timings = timing.compare({"A": call}, device=CPU, budget_s=0.0, min_runs=2, settle_s=0.02)
    assert counts["A"] > 3 + 3 + 5 and timings["A"].runs == 2


def test_limit_is_the_larger_of_arithmetic_and_memory():
    h200 = "NVIDIA H200"
    a = Problem("fprop", 8, 32, 512, 512, 64, 5, 9, padding=(2, 2, 4, 4), dilation=(2, 3))
    assert limits.limit_ms(a, h200) == pytest.approx(limits.needed_flops(a) / 51e12 * 1e3)
    depthwise = Problem("fprop", 64, 96, 56, 56, 96, 1, 1, groups=96, dtype=torch.float16)
    assert limits.limit_ms(depthwise, h200) == pytest.approx(2 * 64 * 96 * 56 * 56 * 2 / 4.3e12 * 1e3, rel=1e-4)
    assert limits.least_ms(depthwise, h200) == limits.least_memory_ms(depthwise, h200)
    assert limits.least_ms(depthwise, h200) == pytest.approx(limits.limit_ms(depthwise, h200) * 4.3 / 4.8)


def test_pixels_that_no_tap_reads_are_not_counted():
    """A patch embedding with gaps reads a quarter of its image."""
    whole = Problem("fprop", 8, 64, 64, 64, 64, 1, 1, groups=64, dtype=torch.float16)
    strided = Problem("fprop", 8, 64, 64, 64, 64, 1, 1, stride=(2, 2), groups=64, dtype=torch.float16)
    plane = 8 * 64 * 64 * 64 * 2
    assert whole.bytes - strided.bytes == pytest.approx(1.5 * plane, rel=1e-3)
    assert limits.limit_ms(strided, "NVIDIA H200") == pytest.approx(0.5 * plane / 4.3e12 * 1e3, rel=1e-3)


def test_no_measured_ceiling_is_above_the_data_sheet():
    assert limits.CEILINGS.keys() <= limits.DATA_SHEETS.keys()
    for gpu, measured in limits.CEILINGS.items():
        sheet = limits.DATA_SHEETS[gpu]
        assert measured.bytes_per_s < sheet.bytes_per_s and measured.flops_per_s.keys() <= sheet.flops_per_s.keys()
        assert all(rate < sheet.flops_per_s[label] for label, rate in measured.flops_per_s.items())


def test_unknown_gpu_or_precision_has_no_limit():
    double = Problem("fprop", 1, 1, 8, 8, 1, 3, 3, dtype=torch.float64)  # no ceiling was measured
    assert limits.limit_ms(double, "NVIDIA H200") is None and limits.least_ms(double, "NVIDIA H200") > 0
    problem = Problem("fprop", 1, 1, 8, 8, 1, 3, 3, dtype=torch.complex64)
    assert limits.limit_ms(problem, "NVIDIA H200") is None
    assert limits.least_ms(problem, "NVIDIA H200") is None and limits.least_memory_ms(problem, "NVIDIA H200") > 0
    for limit in (limits.limit_ms, limits.least_ms, limits.least_memory_ms):
        assert limit(problem, "Some other GPU") is None


@pytest.mark.parametrize("label, ms", [("tf32", 0.758), ("fp32", 7.28), ("fp16", 0.4096), ("bf16", 0.4096)])
def test_limits_of_layer_a(label, ms):
    """The figures that the measured table of layer A is judged by."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(label, torch.float32)
    precision = "tf32" if label == "tf32" else "ieee"
    a = Problem(
        "fprop", 8, 32, 512, 512, 64, 5, 9, padding=(2, 2, 4, 4), dilation=(2, 3), dtype=dtype, precision=precision
    )
    assert limits.limit_ms(a, "NVIDIA H200 NVL") == pytest.approx(ms, rel=0.01)
