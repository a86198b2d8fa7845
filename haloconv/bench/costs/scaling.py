"""Weak scaling: the training step of a U-Net whose images have more rows with each GPU, beside that of one GPU."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haloconv import env
from haloconv.bench.costs.kernels import Cost
from haloconv.precision import PrecisionLabel

RANKS = (1, 2, 4)
EFFICIENCY_BARS = {2: 0.92, 4: 0.85}
"""The least efficiency by ranks, of steps in a row: ms of one rank over ms of that many, each with as many rows."""
PRECISIONS: tuple[PrecisionLabel, ...] = ("tf32", "fp32")
ERROR_LIMIT = 1e-3
"""The most that gradients of the small image may be off in full fp32, relative to their norm. Where max pooling has two
pixels that are nearly equal another one may be taken: in TF32 that would move them by 1e-2 now and then. A halo that is
missing moves them by far more, on images of so few rows a rank: tests/cpu/test_scaling.py."""
TIME_LIMIT_S = 300
POLL_S = 0.05


class ScalingError(RuntimeError):
    """A rank failed, or was not done in time."""


@dataclass(frozen=True)
class Workload:
    """What each rank trains on: ``rows`` of images of ``variables`` channels; the first level has ``channels``.

    Rows and columns are multiples of 4. The default is half a globe of a quarter degree: 720 x 1440. As many ``steps``
    are timed alone, and as many in groups of ``in_a_row``.
    """

    rows: int = 720
    columns: int = 1440
    variables: int = 64
    channels: int = 64
    batch: int = 4
    warm_up: int = 20
    steps: int = 30
    in_a_row: int = 10

    @property
    def case(self) -> str:
        """The name in rows."""
        return f"unet_{self.channels}_of_{self.batch}x{self.variables}x{self.rows}x{self.columns}"


@dataclass(frozen=True)
class Scaling(Cost):
    """The step of one number of ranks by the host's clock: the slowest rank's median.

    Of one rank it is the faster of two: that of the accelerated model on plain tensors, and that of the sharded model
    on a mesh of one; ``is_sharded`` tells which.

    Attributes:
        ms: of a step alone, from an idle device to an idle device: what the host does while the device waits is in it.
        spread: of these, between quartiles, relative.
        efficiency: the ``ms`` of one rank over these.
        in_a_row_ms: of a step among ``Workload.in_a_row`` that follow each other, as in a training loop: the host runs
            ahead of the device, if it is fast enough.
        in_a_row_efficiency: the ``in_a_row_ms`` of one rank over these. The bar is for this one.
        peak_bytes: like ``error``, ``messages``, ``halo_bytes`` and ``weight_bytes`` those of ``timed_rank``, the most
            of a rank.
    """

    case: str
    precision: PrecisionLabel
    ranks: int
    ms: float
    spread: float
    efficiency: float
    in_a_row_ms: float
    in_a_row_efficiency: float
    efficiency_bar: float | None
    peak_bytes: int | None
    error: float
    messages: int
    halo_bytes: int
    weight_bytes: int
    is_sharded: bool

    @property
    def within_budget(self) -> bool:
        """Whether gradients are right, and the efficiency is at its bar."""
        return self.error <= ERROR_LIMIT and self.in_a_row_efficiency >= (self.efficiency_bar or 0)


def scaling(
    workload: Workload, precision: PrecisionLabel, devices: Sequence[str], ranks: Sequence[int] = RANKS
) -> Iterator[Scaling]:
    """Time the step on each number of ranks, the first of which is 1, on the first of the devices; each as it is done.

    Raises ScalingError with the sentence of a rank that failed.
    """
    first: Scaling | None = None
    for count in ranks:
        forms = [(form, _together(workload, precision, devices[:count], form)) for form in (False, True)[count > 1 :]]
        is_sharded, measured = min(forms, key=lambda each: statistics.median(_slowest(each[1], "in_a_row_ms")))
        slowest, in_a_row_ms = _slowest(measured, "ms"), statistics.median(_slowest(measured, "in_a_row_ms"))
        ms, (low, _, high) = statistics.median(slowest), statistics.quantiles(slowest, n=4)
        names = ("error", "messages", "halo_bytes", "weight_bytes")
        most = {name: max(each[name] for each in measured) for name in names} | {"is_sharded": is_sharded}
        peaks = [each["peak_bytes"] for each in measured]
        efficiency, spread = first.ms / ms if first else 1.0, (high - low) / ms
        in_a_row = in_a_row_ms, first.in_a_row_ms / in_a_row_ms if first else 1.0
        peak = None if None in peaks else max(peaks)
        bar = EFFICIENCY_BARS.get(count)
        done = Scaling(workload.case, precision, count, ms, spread, efficiency, *in_a_row, bar, peak, **most)
        first = first or done
        yield done


def _slowest(measured: Sequence[dict[str, Any]], what: str) -> list[float]:
    """The times of this name of the rank whose median is the largest."""
    return max((each[what] for each in measured), key=statistics.median)


def _together(
    workload: Workload, precision: PrecisionLabel, devices: Sequence[str], is_sharded: bool
) -> list[dict[str, Any]]:
    """What each of the ranks measured. None outlives this call."""
    with tempfile.TemporaryDirectory(prefix="haloconv-") as name:
        folder = Path(name)
        order = {**asdict(workload), "tf32": precision == "tf32", "is_sharded": is_sharded}
        numbers = range(len(devices))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for number in numbers:
                ranks.append(_start(number, devices, order, folder))
            _wait(ranks, folder)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [json.loads(_output(folder, number).read_text().splitlines()[-1]) for number in numbers]


def _start(rank: int, devices: Sequence[str], order: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    """A rank at work: what it says goes to files in the folder."""
    place = {"rank": rank, "ranks": len(devices), "device": devices[rank], "meeting": str(folder / "meeting")}
    order_file = folder / f"rank{rank}.json"
    order_file.write_text(json.dumps({**order, **place}))
    # Nobody measures which kernel to take: kernels are those of the rules, on one rank as on many.
    surroundings = env.child_environment(**{env.TUNE: "off"})
    with order_file.open() as given, _output(folder, rank).open("w") as out, _errors(folder, rank).open("w") as err:
        command = [sys.executable, "-m", "haloconv.bench.costs.scaling_rank"]
        return subprocess.Popen(command, stdin=given, stdout=out, stderr=err, env=surroundings)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all are done. Raises ScalingError as soon as one fails, or after the time limit."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while True:
        codes = [rank.poll() for rank in ranks]
        for i, code in enumerate(codes):
            if code:
                said = _errors(folder, i).read_text(errors="replace").strip().splitlines() or ["without a word"]
                raise ScalingError(f"rank {i} of {len(ranks)} exited with {code}: {said[-1]}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise ScalingError(f"rank {codes.index(None)} of {len(ranks)} was not done after {TIME_LIMIT_S} s")
        time.sleep(POLL_S)


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.out"


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.err"
