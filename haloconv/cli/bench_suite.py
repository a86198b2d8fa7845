"""``haloconv bench`` on layers, of a suite or random: checked, timed, each row recorded as soon as it stands."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console

from haloconv.bench.layer import LAYOUTS, Layer
from haloconv.bench.results import MAIN_SUITE, append_rows, latest_name, refresh_latest
from haloconv.bench.sample import LEAST_RATIO, Drawn, compile_ahead, slower
from haloconv.bench.stale import Run
from haloconv.bench.suite import Case
from haloconv.bench.trial import Budget, above_the_ceiling, try_step, try_training_step
from haloconv.cli.run import make_progress, show
from haloconv.env import environment_stamp
from haloconv.layout import Layout
from haloconv.problem import DIRECTIONS
from haloconv.report import Report, Row

Timed = Literal["fprop", "dgrad", "wgrad", "step"]
TIMED: tuple[Timed, ...] = (*DIRECTIONS, "step")


class Piece(NamedTuple):
    """One layer in one precision and layout, and the directions to time. ``family`` may be ``"auto"``."""

    case: Case
    precision: str
    layout: Layout
    family: str
    directions: tuple[Timed, ...]

    def __str__(self) -> str:
        return f"{self.case.name} {self.precision} {self.layout}"


@dataclass(frozen=True)
class Order:
    """What to time. ``suite`` is the name of the suite's file, and of the rows'.

    After ``limit_s`` seconds no further piece is begun.
    """

    pieces: list[Piece]
    budget: Budget
    suite: str = MAIN_SUITE
    limit_s: float | None = None

    @property
    def latest(self) -> str:
        """The file that keeps the newest row of each combination."""
        return latest_name(self.suite)


def pieces(
    cases: Iterable[Case],
    directions: Sequence[Timed],
    precisions: Iterable[str],
    layouts: Iterable[Layout],
    family: str,
) -> list[Piece]:
    """Every combination."""
    combinations = itertools.product(cases, precisions, layouts)
    return [Piece(case, precision, layout, family, tuple(directions)) for case, precision, layout in combinations]


def stale_pieces(cases: Iterable[Case], runs: dict[Run, list[str]]) -> list[Piece]:
    """What has to run again, of these cases, in their order."""
    known = {case.name: case for case in cases}
    found = [
        Piece(
            known[run.case],
            run.precision,
            next(layout for layout in LAYOUTS if layout == run.layout),
            run.family,
            tuple(each for each in TIMED if each in directions),
        )
        for run, directions in runs.items()
        if run.case in known
    ]
    return sorted(found, key=lambda piece: list(known).index(piece.case.name))


def bench_suite(order: Order, device: torch.device, folder: Path, console: Console) -> bool:
    """Time every piece, record each row as soon as it stands, print the table; True if all were begun and all passed.

    What a family asked for by name does not take is said in a note, neither timed nor recorded.
    """
    if not order.pieces:
        console.print("every row is of today's sources: there is nothing to time again")
        return True
    environment = environment_stamp()
    report = Report(f"haloconv bench on {environment['gpu']}", environment)
    path: Path | None = None
    left, deadline = 0, None if order.limit_s is None else time.monotonic() + order.limit_s
    with make_progress(console) as progress:
        task = progress.add_task("bench", total=len(order.pieces))
        for piece in order.pieces:
            if deadline is not None and time.monotonic() > deadline:
                left += 1
                continue
            for row in _rows_of(piece, order.budget, device, report.notes):
                progress.update(task, description=f"{piece}: {row.direction} done")
                report.rows.append(row)
                report.notes += [note for note in [above_the_ceiling(row)] if note]
                path = append_rows(folder, order.suite, [row.record(environment)])
                refresh_latest(folder, order.suite)
            progress.advance(task)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    show(report, console)
    if path is not None:
        console.print(f"wrote {path} and {folder / order.latest}", highlight=False, markup=False)
    if left:
        console.print(f"LEFT {left} of {len(order.pieces)} layers: --limit was used up", style="yellow")
    return report.passed and not left


def _rows_of(piece: Piece, budget: Budget, device: torch.device, notes: list[str]) -> Iterator[Row]:
    """The rows of a piece as they come; ``notes`` hears of directions that the family does not take."""
    layer = piece.case.layer(piece.precision, piece.layout, piece.family, device)
    for direction in piece.directions:
        refusal = _refusal(layer, direction)
        if refusal is None:
            yield _try(layer, direction, budget)
        else:
            what = f"{piece.case.name} {direction} {piece.precision} {piece.layout}"
            notes.append(f"{what}: {piece.family} does not take it: {refusal}")


def _refusal(layer: Layer, direction: Timed) -> str | None:
    """Why the family asked for by name does not take a single direction, or None."""
    if layer.spec.family in ("auto", "aten") or direction == "step":
        return None
    choice = layer.choice(direction)
    return choice.reason if choice.refused else None


def _try(layer: Layer, direction: Timed, budget: Budget) -> Row:
    return try_training_step(layer, budget) if direction == "step" else try_step(layer, direction, budget)


def bench_sample(drawn: list[Drawn], budget: Budget, device: torch.device, folder: Path, console: Console) -> bool:
    """Time random problems with the choice of auto; True if all passed and none is far slower than PyTorch."""
    environment = environment_stamp()
    report = Report(f"haloconv bench --sample on {environment['gpu']}", environment)
    budget = replace(budget, other_layout=False)
    with make_progress(console) as progress:
        task = progress.add_task("compiling", total=len(drawn))
        if device.type == "cuda":
            compile_ahead(drawn, device)
        for each in drawn:
            progress.update(task, description=each.case.name)
            layer = each.case.layer(each.precision, each.layout, "auto", device)
            report.rows.append(try_step(layer, each.direction, budget))
            progress.advance(task)
    report.notes += [note for note in map(above_the_ceiling, report.rows) if note]
    path = append_rows(folder, "sample", [row.record(environment) for row in report.rows])
    show(report, console)
    slow = slower(report.rows)
    own = sum(row.family != "aten" for row in report.rows)
    console.print(
        f"{len(slow)} of {len(report.rows)} problems below {LEAST_RATIO} times PyTorch's speed; {own} ran on our "
        f"kernels; wrote {path}",
        highlight=False,
    )
    for row in slow:
        console.print(f"SLOWER {row.case} {row.direction} {row.precision} {row.layout}: {row.ratio:.2f}", style="red")
    return report.passed and not slow
