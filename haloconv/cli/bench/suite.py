"""``haloconv bench`` on layers, of a suite or random: checked, timed, each row recorded as soon as it stands."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console

from haloconv.bench.cut_layer import CutLayer
from haloconv.bench.layer import Layer
from haloconv.bench.one_kernel import only
from haloconv.bench.results import (
    IDENTITY,
    MAIN_SUITE,
    ResultRow,
    append_rows,
    key_of,
    latest_name,
    read_rows,
    refresh_latest,
)
from haloconv.bench.sample import LEAST_RATIO, Drawn, compile_ahead, verdict, verdict_of_own
from haloconv.bench.stale import KERNEL_ASKED_FOR, LayerSetting
from haloconv.bench.suite import Case
from haloconv.bench.trial import Budget, above_the_ceiling, try_step, try_training_step
from haloconv.cli.live import make_progress, show
from haloconv.env import environment_stamp
from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel
from haloconv.problem import DIRECTIONS
from haloconv.report import Report, Row

Timed = Literal["fprop", "dgrad", "wgrad", "step"]
TIMED: tuple[Timed, ...] = (*DIRECTIONS, "step")


class Piece(NamedTuple):
    """One layer in one precision and layout, and the directions to time.

    ``family`` may be ``"auto"``, or a kernel's name.
    """

    case: Case
    precision: PrecisionLabel
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
    precisions: Iterable[PrecisionLabel],
    layouts: Iterable[Layout],
    family: str,
) -> list[Piece]:
    """Every combination."""
    combinations = itertools.product(cases, precisions, layouts)
    return [Piece(case, precision, layout, family, tuple(directions)) for case, precision, layout in combinations]


def stale_pieces(cases: Iterable[Case], settings: dict[LayerSetting, list[str]]) -> list[Piece]:
    """What has to run again, of these cases, in their order."""
    known = {case.name: case for case in cases}
    found = [
        Piece(
            known[setting.case],
            setting.precision,
            setting.layout,
            setting.family,
            tuple(each for each in TIMED if each in directions),
        )
        for setting, directions in settings.items()
        if setting.case in known
    ]
    return sorted(found, key=lambda piece: list(known).index(piece.case.name))


def bench_suite(order: Order, device: torch.device, folder: Path, console: Console) -> bool:
    """Time every piece, record each row as soon as it stands, print the table; True if all were begun and all passed.

    What a family or a kernel asked for by name does not take is said in a note, neither timed nor recorded.
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
    """The rows of a piece as they come; ``notes`` hears of directions that the family or the kernel does not take."""
    with only(piece.family) as family:
        layer = piece.case.layer(piece.precision, piece.layout, family, device)
        notes += layer.notes
        for direction in piece.directions:
            refusal = _refusal(layer, direction, piece.family)
            if refusal is None:
                row = _try(layer, direction, budget)
                yield row if family == piece.family else replace(row, reason=KERNEL_ASKED_FOR)
            else:
                what = f"{piece.case.name} {direction} {piece.precision} {piece.layout}"
                notes.append(f"{what}: {refusal}")


def _refusal(layer: Layer, direction: Timed, asked: str) -> str | None:
    """Why a direction is not timed: what was asked for by name does not take it, or shards have none; else None."""
    if direction == "step" and isinstance(layer, CutLayer) and layer.shards > 1:
        return "shards are timed direction by direction"
    family = layer.spec.family
    if asked != family and (direction == "step" or isinstance(layer, CutLayer)):
        return f"{asked} is one kernel, and this runs several"
    if family in ("auto", "aten") or direction == "step":
        return None
    choice = layer.choice(direction)
    if choice.refused:
        return f"{asked} does not take it: {choice.reason}"
    try:
        layer.ran(direction)
    except RuntimeError as error:  # tensors of other forms than dense ones
        return str(error)
    return None


def _try(layer: Layer, direction: Timed, budget: Budget) -> Row:
    return try_training_step(layer, budget) if direction == "step" else try_step(layer, direction, budget)


@dataclass(frozen=True)
class SampleOrder:
    """The problems that ``seed`` drew, or that somebody chose. After ``limit_s`` seconds no further ones are begun.

    The next run goes on. What was chosen says nothing of what ``auto`` does in the mean: its rows have a file apart.
    """

    drawn: list[Drawn]
    budget: Budget
    seed: int | None = 0
    limit_s: float | None = None

    @property
    def rows_of(self) -> str:
        """The name of the rows' files."""
        return "chosen" if self.seed is None else "sample"


def bench_sample(order: SampleOrder, device: torch.device, folder: Path, console: Console) -> bool:
    """Time drawn problems with the choice of auto, but for those that have a row of this seed, if any, and commit.

    True if all have one, all passed, and none is far slower than PyTorch.
    """
    environment = environment_stamp()
    report = Report(f"haloconv bench --sample on {environment['gpu']}", environment)
    known = _known_rows(order, folder, environment["commit"])
    left = [each for each in order.drawn if each.key not in known]
    whose = "chosen" if order.seed is None else f"--seed {order.seed}"
    console.print(f"{whose}: {len(left)} of {len(order.drawn)} problems to time", highlight=False)
    deadline = None if order.limit_s is None else time.monotonic() + order.limit_s
    with make_progress(console) as progress:
        task = progress.add_task("compiling", total=len(left))
        while left and (deadline is None or time.monotonic() < deadline):
            few, left = left[:_COMPILED_AT_ONCE], left[_COMPILED_AT_ONCE:]
            if device.type == "cuda":
                compile_ahead(few, device)
            for each in few:
                progress.update(task, description=each.case.name)
                layer = each.case.layer(each.precision, each.layout, "auto", device)
                row = try_step(layer, each.direction, replace(order.budget, other_layout=False))
                report.rows.append(row)
                append_rows(folder, order.rows_of, [{**row.record(environment), "seed": order.seed}])
                progress.advance(task)
    report.notes += [note for note in map(above_the_ceiling, report.rows) if note]
    if report.rows:
        show(report, console)
    return _tell_verdict(order, folder, environment["commit"], console) and not left


_COMPILED_AT_ONCE = 16


def _known_rows(order: SampleOrder, folder: Path, commit: str) -> dict[tuple[object, ...], ResultRow]:
    """The newest row of each problem that was drawn with this seed, or chosen, and timed at this commit."""
    rows = (row for path in sorted(folder.glob(f"????-??-??-{order.rows_of}.jsonl")) for row in read_rows(path))
    return {key_of(row): row for row in rows if row.get("seed") == order.seed and row.get("commit") == commit}


def _tell_verdict(order: SampleOrder, folder: Path, commit: str, console: Console) -> bool:
    """Print what the draw came to, over all runs; True if every row passed and none is below LEAST_RATIO."""
    found = _known_rows(order, folder, commit)
    rows = [found[each.key] for each in order.drawn if each.key in found]
    ratios = [float(str(row["ratio"])) for row in rows if row["ratio"] is not None]
    console.print(f"{verdict(ratios)}; {verdict_of_own(rows)}; rows are in {folder}", highlight=False)
    if len(rows) < len(order.drawn):
        again = "run it again" if order.seed is None else f"run it again with --seed {order.seed}"
        left = f"LEFT {len(order.drawn) - len(rows)} of {len(order.drawn)}: {again}"
        console.print(left, style="yellow", highlight=False)
    slow = sorted((row for row in rows if _ratio_of(row) < LEAST_RATIO), key=_ratio_of)
    for row in slow:
        where = " ".join(str(row[name]) for name in IDENTITY)
        console.print(f"SLOWER {where}: {_ratio_of(row):.2f}", style="red", highlight=False)
    return not slow and all(row["passed"] for row in rows)


def _ratio_of(row: ResultRow) -> float:
    return math.inf if row["ratio"] is None else float(str(row["ratio"]))
