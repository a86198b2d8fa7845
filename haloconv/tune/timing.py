"""The one timing protocol.

Every variant is warmed up, where asked for until the GPU's clock has settled under this very load; then the variants
alternate, A B A B, in one process. Before each timed call a buffer of twice the L2 cache is written, outside the pair
of events that brackets the call. A round of runs is enqueued behind a
sleeping kernel and synchronised once, so that the events see the device's time and never the host's. Calls that launch
hundreds of kernels, as whole models do, are captured as CUDA graphs and replayed: a driver queues about a thousand
launches, and what comes after them would be timed at the host's pace. If one of the variants cannot be captured, each
call of all gets a sleeping kernel of its own. Reported are medians with their spread. On the CPU the clock is
`time.perf_counter` and nothing is flushed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]

WARMUP_CALLS = 3
ROUND_MS = 60.0
MAX_RUNS_PER_ROUND = 60
MAX_SLEEP_MS = 100.0
SLEEP_PER_HOST_TIME = 1.5
SLEEP_CYCLES_PER_MS = 2_000_000
L2_BYTES_IF_UNKNOWN = 64 * 2**20
SETTLED, MOST_SETTLING = 0.01, 5  # by how much rounds of a settled clock differ; times the seconds asked for
LONG_HOST_MS = 2.0  # for a call of each, some hundred launches: beyond, each call has a sleeping kernel of its own


@dataclass(frozen=True)
class Timing:
    """The time of one call: the median in ms, (p80 - p20) / median as ``spread``, and how many runs it stands on."""

    ms: float
    spread: float
    runs: int


def compare(
    variants: Mapping[str, Call],
    *,
    device: torch.device,
    budget_s: float = 1.0,
    min_runs: int = 10,
    settle_s: float = 0.0,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, Timing]:
    """Time the variants against each other on ``device``, which alternate call by call.

    Stops after ``budget_s`` seconds of wall time, but not before every variant has ``min_runs`` runs. With ``settle_s``
    the variants run for as many seconds before, and until two rounds in a row take about the same time.
    ``on_progress`` is told the finished part, from 0 to 1.

    Raises ValueError if there is no variant or ``min_runs`` is not positive, and whatever a variant raises.
    """
    if not variants or min_runs < 1:
        raise ValueError(f"compare needs a variant and a run, not {list(variants)} and min_runs={min_runs}")
    clock = _CudaClock(device) if device.type == "cuda" else _CpuClock()
    calls = list(variants.values())
    calls = clock.warm_up(calls)
    if settle_s > 0:
        _settle(clock, calls, settle_s)
    samples: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    while True:
        for times, new in zip(samples, clock.round(calls), strict=True):
            times.extend(new)
        runs, spent = len(samples[0]), time.perf_counter() - start
        if on_progress is not None:
            on_progress(min(1.0, runs / min_runs, spent / budget_s if budget_s > 0 else 1.0))
        if runs >= min_runs and spent >= budget_s:
            return {name: summarise(times) for name, times in zip(variants, samples, strict=True)}


def _settle(clock: _CpuClock | _CudaClock, calls: list[Call], settle_s: float) -> None:
    """Rounds that are not counted, until the clock stands still; for MOST_SETTLING times ``settle_s`` at most."""
    start, before = time.perf_counter(), math.inf
    while True:
        now = sum(map(statistics.median, clock.round(calls)))
        spent = time.perf_counter() - start
        if spent >= MOST_SETTLING * settle_s or (spent >= settle_s and abs(now - before) <= SETTLED * now):
            return
        before = now


def summarise(times_ms: list[float]) -> Timing:
    """The median and the spread of a list of times in ms.

    Raises ValueError if the list is empty.
    """
    if not times_ms:
        raise ValueError("no times to summarise")
    median = statistics.median(times_ms)
    ordered = sorted(times_ms)
    low, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.2, 0.8))
    return Timing(ms=median, spread=(high - low) / median if median else 0.0, runs=len(ordered))


def host_cost(fn: Call, repeats: int = 200, rounds: int = 9, device: torch.device | None = None) -> float:
    """Wall microseconds that the host needs to enqueue one call of ``fn``; the device is waited for outside the clock.

    The median over ``rounds`` loops of ``repeats`` calls. ``device``: the CUDA device to wait for, the current one by
    default; without CUDA nothing is waited for.
    """
    for _ in range(repeats):
        fn()
    costs = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            fn()
        costs.append((time.perf_counter() - start) / repeats * 1e6)
    synchronize(device)
    return statistics.median(costs)


def captured(calls: list[Call], device: torch.device) -> list[Call] | None:
    """The calls as replays of CUDA graphs; None if one of them cannot be captured, or memory does not hold them."""
    graphs: list[torch.cuda.CUDAGraph] = []
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        for call in calls:
            with torch.cuda.stream(stream):
                call()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=stream):
                call()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return None
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize(device)
    return [graph.replay for graph in graphs]


def synchronize(device: torch.device | None) -> None:
    """Wait for the CUDA device, the current one by default; nothing is waited for on others and without CUDA."""
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        torch.cuda.synchronize(device)


class _CpuClock:
    """One run of every variant per round, by the wall clock."""

    def warm_up(self, calls: list[Call]) -> list[Call]:
        for call in calls:
            call()
        return calls

    def round(self, calls: list[Call]) -> list[list[float]]:
        return [[self._time(call)] for call in calls]

    def _time(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


class _CudaClock:
    """Rounds of several runs on the current stream, each between two events, behind one sleeping kernel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        l2_bytes = getattr(properties, "L2_cache_size", 0) or L2_BYTES_IF_UNKNOWN
        self.buffer = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device)
        self.repeats = 1
        self.host_ms = 0.0

    def warm_up(self, calls: list[Call]) -> list[Call]:
        """The calls as they are to be timed."""
        with torch.cuda.device(self.device):
            for _ in range(WARMUP_CALLS):
                for call in calls:
                    call()
            torch.cuda.synchronize()
            self._measure_once(calls)
            if self.host_ms > LONG_HOST_MS:
                calls = captured(calls, self.device) or calls
                self._measure_once(calls)
        return calls

    def _measure_once(self, calls: list[Call]) -> None:
        """Learn how long a call of each takes on the host and on the device, and so how often a round repeats them."""
        pairs = self._pairs(calls, 1)
        start = time.perf_counter()
        self._enqueue(calls, pairs)
        self.host_ms = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        once_ms = (time.perf_counter() - start) * 1e3
        wanted = math.ceil(ROUND_MS / max(once_ms, 1e-3))
        coverable = int(MAX_SLEEP_MS / (SLEEP_PER_HOST_TIME * max(self.host_ms, 1e-3)))
        self.repeats = max(1, min(wanted, coverable, MAX_RUNS_PER_ROUND // len(calls)))

    def round(self, calls: list[Call]) -> list[list[float]]:
        with torch.cuda.device(self.device):
            pairs = self._pairs(calls, self.repeats)
            if self.host_ms <= LONG_HOST_MS:
                self._cover(calls, pairs, self.host_ms * self.repeats)
            else:
                for i, pair in enumerate(pairs):
                    self._cover([calls[i % len(calls)]], [pair], self.host_ms)
        times = [start.elapsed_time(end) for start, end in pairs]
        return [times[i :: len(calls)] for i in range(len(calls))]

    def _cover(self, calls: list[Call], pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]], host_ms: float) -> None:
        """Enqueue the calls behind a kernel that sleeps for longer than ``host_ms``, and wait for them."""
        torch.cuda.synchronize()
        sleep_ms = min(MAX_SLEEP_MS, SLEEP_PER_HOST_TIME * host_ms + 0.2)
        torch.cuda._sleep(int(sleep_ms * SLEEP_CYCLES_PER_MS))
        self._enqueue(calls, pairs)
        torch.cuda.synchronize()

    @staticmethod
    def _pairs(calls: list[Call], repeats: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        return [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats * len(calls))
        ]

    def _enqueue(self, calls: list[Call], pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        for i, (start, end) in enumerate(pairs):
            self.buffer.zero_()
            start.record()
            calls[i % len(calls)]()
            end.record()
