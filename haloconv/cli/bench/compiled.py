"""``haloconv bench --models --compiled``: networks eager and compiled, by PyTorch and on our kernels, recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from haloconv.bench.networks.compiled import VARIANTS, CutShortError, Piece, PieceControl, forget_compiled, try_piece
from haloconv.bench.networks.network import Effort, ignore
from haloconv.bench.networks.resume import expected_s, left_to_do
from haloconv.bench.networks.workers import Place, shared
from haloconv.bench.results import ResultRow, append_rows, latest_name, read_rows, refresh_latest
from haloconv.bench.targets import TargetError
from haloconv.bench.values import ModelError
from haloconv.cli.bench.models import NetworkOrder
from haloconv.cli.live import make_progress
from haloconv.env import environment_stamp
from haloconv.problem_file import ProblemFileError
from haloconv.report.table import ms_text, ratio_text

SUITE = "compiled"

CUT = "compiled-cut"
"""The files of what did not end within a limit: it is not begun again where no more time is left."""


class Attempt(NamedTuple):
    """What came of a piece: its row, or why it has none, and the seconds that it took, 0 if it was not begun."""

    row: ResultRow | None
    why: str = ""
    seconds: float = 0.0


def bench_compiled(order: NetworkOrder, devices: Sequence[torch.device], folder: Path, console: Console) -> bool:
    """True if every check passed and nothing was cut; what has a row of today's sources is not run again.

    On several devices, or with several jobs, processes share the pieces. Of each device one at a time uses it.
    """
    deadline = math.inf if order.limit_s is None else time.time() + order.limit_s
    environment, wanted = environment_stamp(), _pieces(order)
    if not wanted:
        console.print("every row is of today's sources: there is nothing to time again")
        return True
    pieces = left_to_do(wanted, read_rows(folder / latest_name(SUITE)), environment, order.effort)
    left: list[str] = []
    with make_progress(console) as progress:
        task = progress.add_task("compiled", total=len(pieces))

        def announce(what: str) -> None:
            progress.update(task, description=what)

        announce(f"compiled: {order.jobs} at once on {len(devices)} GPUs")
        alone = len(devices) * order.jobs == 1
        attempt = partial(_attempt, order.effort, folder, deadline, announce if alone else ignore)
        for piece, tried in shared(attempt, pieces, devices, order.jobs):
            progress.advance(task)
            key = dict(zip(("case", "direction", "precision", "layout"), piece.key, strict=True))
            facts = {"seconds": round(tried.seconds, 1), "searched": order.effort.search, **environment}
            if tried.row is not None:
                append_rows(folder, SUITE, [{**tried.row, **facts}])
                refresh_latest(folder, SUITE)
                continue
            left.append(f"{piece}: {tried.why}")
            if tried.seconds:
                append_rows(folder, CUT, [{**key, **facts}])
    keys = {piece.key for piece in wanted}
    rows = [row for row in read_rows(folder / latest_name(SUITE)) if _key(row) in keys]
    return _tell(rows, left, folder, console)


def _pieces(order: NetworkOrder) -> list[Piece]:
    """Every setting in every direction, or of those the rows that are wanted."""
    pieces = [Piece(setting, direction) for setting in order.settings for direction in order.directions]
    wanted = order.wanted
    if wanted is None:
        return pieces
    return [each for each in pieces if (each.setting.case.name, each.direction) in wanted[each.setting]]


def _needed_s(piece: Piece, folder: Path, effort: Effort) -> float:
    """The seconds that a piece is likely to take, by the rows that there are by now."""
    rows = [row for what in (SUITE, CUT) for path in folder.glob(f"????-??-??-{what}.jsonl") for row in read_rows(path)]
    return expected_s(piece, rows, effort)


def _attempt(
    effort: Effort,
    folder: Path,
    deadline: float,
    announce: Callable[[str], None],
    piece: Piece,
    place: Place,
) -> Attempt:
    """Run a piece where it is likely to end before the deadline, a ``time.time()``, which processes share."""
    began, needed_s = time.time(), _needed_s(piece, folder, effort)
    if began + needed_s > deadline:
        needs = f", and it takes about {needed_s:.0f} s" if began < deadline else ""
        return Attempt(None, f"cut, {max(0.0, deadline - began):.0f} s of --limit are left{needs}")
    device = place.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), place.gpu:
        try:
            row = try_piece(piece, effort, device, PieceControl(announce, place.gpu, deadline))
        except CutShortError as error:
            return Attempt(None, f"cut {error}, --limit was used up", time.time() - began)
        except (ModelError, ProblemFileError, TargetError) as error:
            return Attempt(None, str(error))
        except torch.cuda.OutOfMemoryError:
            return Attempt(None, "the GPU's memory does not hold all its copies")
        finally:
            forget_compiled()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return Attempt({**row, "beside": place.beside}, seconds=time.time() - began)


def _key(row: ResultRow) -> tuple[str, str, str, str]:
    return str(row["case"]), str(row["direction"]), str(row["precision"]), str(row["layout"])


def fastest(rows: Iterable[ResultRow], ours: bool) -> tuple[str, dict[str, Any]] | None:
    """The name and the figures of the fastest variant of one side in these rows, which may be of both layouts."""
    names = [str(variant) for variant in VARIANTS if variant.ours == ours]
    found = [(name, _variants(row)[name]) for row in rows for name in names if _variants(row).get(name, {}).get("ms")]
    return min(found, key=lambda each: each[1]["ms"], default=None)


def _variants(row: ResultRow) -> dict[str, dict[str, Any]]:
    return cast("dict[str, dict[str, Any]]", row["variants"])


def _tell(rows: Sequence[ResultRow], left: list[str], folder: Path, console: Console) -> bool:
    table = Table(title="ms; ratio and memory: the fastest of both sides, whatever the layout", box=box.SIMPLE_HEAD)
    for head in ("network", "", "precision", "layout"):
        table.add_column(head, no_wrap=True)
    for head in (
        *(str(variant).replace(" ", "\n") for variant in VARIANTS),
        "first call s\nPyTorch, ours",
        "ratio",
        "memory",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        alike = [each for each in rows if _key(each)[:3] == _key(row)[:3]]
        times = [ms_text(_variants(row).get(str(variant), {}).get("ms")) for variant in VARIANTS]
        table.add_row(*_key(row), *times, *_compared(fastest(alike, False), fastest(alike, True)))
    console.print(table)
    complaints = [
        f"{' '.join(_key(row))}, {name}: {variant['complaint']}"
        for row in rows
        for name, variant in _variants(row).items()
        if variant.get("complaint")
    ]
    for style, word, sentences in (("bold red", "FAILED", complaints), ("yellow", "LEFT", left)):
        for sentence in sentences:
            console.print(f"{word} {sentence}", style=style, highlight=False, markup=False)
    console.print(f"{len(rows)} rows are in {folder / latest_name(SUITE)}", highlight=False, markup=False)
    return not complaints and not left


def _compared(theirs: tuple[str, dict[str, Any]] | None, ours: tuple[str, dict[str, Any]] | None) -> list[str]:
    """First calls in seconds, how many times faster ours is, and its memory over PyTorch's."""
    if theirs is None or ours is None:
        return ["–", ratio_text(None), ratio_text(None)]
    (_, their), (_, our) = theirs, ours
    seconds = f"{their['first_call_s']:.1f}, {our['first_call_s']:.1f}"
    memory = our["peak_bytes"] / their["peak_bytes"] if our.get("peak_bytes") and their.get("peak_bytes") else None
    return [seconds, ratio_text(their["ms"] / our["ms"]), ratio_text(memory)]
