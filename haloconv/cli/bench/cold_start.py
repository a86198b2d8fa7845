"""``haloconv bench --cold-start``: how long a new process takes to its first output and first step, recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from haloconv.bench.costs.cold_start import (
    BAR_CORES,
    STEPS,
    WARM_BAR_MS,
    ColdStart,
    ColdStartError,
    Start,
    cold_start,
    left_to_do,
    read_libraries,
)
from haloconv.bench.networks.network import NetworkCase, Setting
from haloconv.bench.results import append_rows, latest_name, read_rows, refresh_latest
from haloconv.cli.live import make_progress
from haloconv.env import environment_stamp
from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel

SUITE = "cold-start"


@dataclass(frozen=True)
class ColdStartOrder:
    """Every network in every precision and layout; after ``limit_s`` seconds nothing further is begun."""

    cases: list[NetworkCase]
    precisions: list[PrecisionLabel]
    layouts: list[Layout]
    limit_s: float | None = None

    @property
    def starts(self) -> list[Start]:
        """Network by network."""
        settings = [
            Setting(case, precision, layout)
            for case in self.cases
            for precision in self.precisions
            for layout in self.layouts
        ]
        return [Start(setting, step) for setting in settings for step in STEPS]


def bench_cold_start(order: ColdStartOrder, device: str, folder: Path, console: Console) -> bool:
    """True if every bar was met and nothing was cut or failed; what has a row of this environment is not run again."""
    environment, began = environment_stamp(), time.monotonic()
    starts = left_to_do(order.starts, read_rows(folder / latest_name(SUITE)), environment)
    found: list[ColdStart] = []
    faults: list[str] = []
    with make_progress(console) as progress:
        task = progress.add_task("cold start", total=len(starts))
        for i, start in enumerate(starts):
            progress.update(task, description=str(start))
            if order.limit_s is not None and time.monotonic() - began > order.limit_s:
                faults += [f"{each}: cut, --limit {order.limit_s:g} was used up" for each in starts[i:]]
                break
            try:
                if i == 0:
                    read_libraries(start, device)
                found.append(cold_start(start, device))
            except ColdStartError as error:
                faults.append(str(error))
                continue
            finally:
                progress.advance(task)
            append_rows(folder, SUITE, [found[-1].record(environment)])
            refresh_latest(folder, SUITE)
    _tell(found, len(order.starts) - len(starts), faults, console)
    return not faults and not any(each.missed() for each in found)


def _tell(found: Sequence[ColdStart], kept: int, faults: Sequence[str], console: Console) -> None:
    table = Table(title="from the start of a process, s (without building the model)", box=box.SIMPLE_HEAD)
    table.add_column("network")
    for head in ("until", "empty cache", "bar", "full cache", "PyTorch", "compiled", "verdict"):
        table.add_column(head, justify="right")
    for each in found:
        bar = "–" if each.empty_bar_ms is None else f"{each.empty_bar_ms / 1e3:g}"
        times = [f"{ms / 1e3:.2f}" for ms in (each.empty_ms, each.warm_ms, each.aten_ms)]
        verdict = "OVER" if each.missed() else "within"
        until = "first output" if each.start.step == "inference" else "first step"
        compiled = str(each.runs["empty"]["compiles"])
        table.add_row(str(each.start.setting), until, times[0], bar, *times[1:], compiled, verdict)
    if found:
        console.print(table)
        console.print(
            f"bars: with a full cache {WARM_BAR_MS / 1e3:g} s behind PyTorch; with an empty one those in the table, "
            f"on {BAR_CORES} cores or more (here {found[0].cores})",
            highlight=False,
        )
    missed = [sentence for each in found for sentence in each.missed()]
    for style, word, sentences in (("red", "MISSED", missed), ("yellow", "LEFT", faults)):
        for sentence in sentences:
            console.print(f"{word} {sentence}", style=style, highlight=False, markup=False)
    console.print(
        f"{len(found)} starts timed, {kept} had a row of this commit, GPU and software, {len(faults)} left out",
        highlight=False,
    )
