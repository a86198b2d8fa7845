"""What a user waits for: from the start of a process to a model's first output, or to the end of its first step.

Each figure is of processes of their own (first_step.py): haloconv with an empty kernel cache, haloconv
with a full one, and PyTorch with cuDNN's search. Records are those that come with the package; nothing is tuned.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haloconv import env
from haloconv.bench.costs import first_step
from haloconv.bench.networks.network import Setting
from haloconv.bench.results import ResultRow, key_of

NETWORKS = ("resnet50", "unet", "convnext_tiny")
STEPS = ("inference", "training")
WARM_BAR_MS = 500.0
"""How many ms haloconv with a full cache may be behind PyTorch."""
EMPTY_BARS_MS = {("resnet50", "inference"): 5_000.0, ("resnet50", "training"): 12_000.0}
"""The most with an empty cache, on a machine of ``BAR_CORES`` cores or more."""
BAR_CORES = 16
RUNS = 3
"""Processes of each kind but those with an empty cache, which is one; the median counts."""
CHILD_TIMEOUT_S = 600

Order = dict[str, Any]


class ColdStartError(RuntimeError):
    """A process failed; the message has what it wrote last."""


@dataclass(frozen=True)
class Start:
    """One network in one setting; ``step`` is ``"inference"`` or ``"training"``."""

    setting: Setting
    step: str

    def __str__(self) -> str:
        return f"{self.setting} {self.step}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What its row is found by."""
        return self.setting.case.name, self.step, self.setting.precision, self.setting.layout

    def order(self, ours: bool, device: str) -> Order:
        """What first_step reads, but for the time."""
        case = self.setting.case
        what = {"target": case.target, "batch": case.batch, "pixels": case.pixels, "device": device}
        how = {"precision": self.setting.precision, "layout": self.setting.layout, "training": self.step == "training"}
        return {**what, **how, "ours": ours}


@dataclass(frozen=True)
class ColdStart:
    """What a start took. ``runs`` has what first_step gave: ``empty``, and the median of ``warm`` and of ``aten``.

    Totals are in ms, without the phase ``build``.
    """

    start: Start
    runs: dict[str, dict[str, Any]]
    cores: int

    @property
    def empty_ms(self) -> float:
        return _total_ms(self.runs["empty"])

    @property
    def warm_ms(self) -> float:
        return _total_ms(self.runs["warm"])

    @property
    def aten_ms(self) -> float:
        return _total_ms(self.runs["aten"])

    @property
    def empty_bar_ms(self) -> float | None:
        """None where there is none: for other networks, and on fewer cores."""
        bar = EMPTY_BARS_MS.get((self.start.setting.case.name, self.start.step))
        return bar if self.cores >= BAR_CORES else None

    def missed(self) -> list[str]:
        """A sentence for each bar that was missed."""
        found = []
        if self.warm_ms > self.aten_ms + WARM_BAR_MS:
            found.append(f"{self.start}: {(self.warm_ms - self.aten_ms) / 1e3:.2f} s behind PyTorch with a full cache")
        if self.empty_bar_ms is not None and self.empty_ms > self.empty_bar_ms:
            found.append(
                f"{self.start}: {self.empty_ms / 1e3:.2f} s of {self.empty_bar_ms / 1e3:g} with an empty cache"
            )
        return found

    def record(self, environment: dict[str, str]) -> ResultRow:
        """The fields of a row."""
        case, direction, precision, layout = self.start.key
        identity = {"case": case, "direction": direction, "precision": precision, "layout": layout}
        times = {"empty_ms": self.empty_ms, "warm_ms": self.warm_ms, "aten_ms": self.aten_ms}
        bars = {"empty_bar_ms": self.empty_bar_ms, "warm_bar_ms": WARM_BAR_MS, "missed": self.missed()}
        return {**identity, **times, **bars, "runs": self.runs, "cores": self.cores, **environment}


def read_libraries(start: Start, device: str) -> None:
    """One process that is not timed: it reads from disk what those behind it find in memory. Raises ColdStartError."""
    with tempfile.TemporaryDirectory(prefix="haloconv-") as name:
        in_new_process(start.order(True, device), Path(name))


def cold_start(start: Start, device: str) -> ColdStart:
    """Time one start on ``device``, in ``2 * RUNS + 1`` processes one after another.

    PyTorch's are the first, so that ours, of which the one with an empty cache has no second try, find cuDNN's
    libraries of this very step in memory as its second and third do.

    Raises ColdStartError if a process fails, or if one compiles what the cache should hold.
    """
    with tempfile.TemporaryDirectory(prefix="haloconv-") as name:
        folder = Path(name)
        aten = [in_new_process(start.order(False, device), folder) for _ in range(RUNS)]
        empty = in_new_process(start.order(True, device), folder)
        warm = [in_new_process(start.order(True, device), folder) for _ in range(RUNS)]
    late = max(each["compiles"] for each in warm)
    if late:
        raise ColdStartError(f"{start}: {late} kernels were compiled although the cache was full")
    runs = {"empty": empty, "warm": _median(warm), "aten": _median(aten)}
    return ColdStart(start, runs, os.cpu_count() or 1)


def _total_ms(found: dict[str, Any]) -> float:
    phases_ms: dict[str, float] = found["phases_ms"]
    return round(sum(ms for phase, ms in phases_ms.items() if phase != first_step.BUILD), 1)


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose total is the median."""
    middle = statistics.median_low(map(_total_ms, runs))
    return next(each for each in runs if _total_ms(each) == middle)


def in_new_process(order: Order, folder: Path) -> dict[str, Any]:
    """Run an order in a new process that has its kernels and records in ``folder``. Raises ColdStartError.

    It keeps the bytecode of what it imports, as pip does that of a package which it installs.
    """
    own = {env.CACHE_DIR: str(folder), env.CACHE: "1", env.RECORDS_DIR: str(folder / "records"), env.TUNE: "off"}
    own["PYTHONDONTWRITEBYTECODE"] = ""
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({first_step.__file__!r}, run_name='__main__')"]
    given = json.dumps({**order, "began": time.time()})
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, env=env.child_environment(**own),
            timeout=CHILD_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ColdStartError(f"{order['target']}: no first step within {CHILD_TIMEOUT_S} s") from None
    if done.returncode:
        raise ColdStartError(f"{order['target']}: {(done.stderr.strip().splitlines() or ['it ended'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def left_to_do(starts: Iterable[Start], rows: Iterable[ResultRow], environment: dict[str, str]) -> list[Start]:
    """The starts without a row of this very environment: GPU, versions, commit."""
    same = [row for row in rows if all(row.get(name) == environment[name] for name in environment if name != "date")]
    done = {key_of(row) for row in same}
    return [start for start in starts if start.key not in done]
