"""``haloconv bench --models --compiled``: networks eager and compiled, by PyTorch and on our kernels, recorded."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from haloconv.bench.networks.compiled import VARIANTS, Piece, left_to_do, try_piece
from haloconv.bench.results import ResultRow, append_rows, latest_name, read_rows, refresh_latest
from haloconv.bench.targets import TargetError
from haloconv.bench.values import ModelError
from haloconv.cli.bench.models import NetworkOrder
from haloconv.cli.live import make_progress
from haloconv.env import environment_stamp
from haloconv.problem_file import ProblemFileError
from haloconv.report.table import ms_text, ratio_text

SUITE = "compiled"


def bench_compiled(order: NetworkOrder, devices: Sequence[torch.device], folder: Path, console: Console) -> bool:
    """True if every check passed and nothing was cut; what has a row of this environment is not run again.

    It runs on the first of the devices.
    """
    environment, began = environment_stamp(), time.monotonic()
    wanted = [Piece(setting, direction) for setting in order.settings for direction in order.directions]
    pieces = left_to_do(wanted, read_rows(folder / latest_name(SUITE)), environment, order.effort)
    left: list[str] = []
    with make_progress(console) as progress:
        task = progress.add_task("compiled", total=len(pieces))
        for i, piece in enumerate(pieces):
            if order.limit_s is not None and time.monotonic() - began > order.limit_s:
                left += [f"{each}: cut, --limit {order.limit_s:g} was used up" for each in pieces[i:]]
                break
            try:
                row = try_piece(piece, order.effort, devices[0], lambda what: progress.update(task, description=what))
            except (ModelError, ProblemFileError, TargetError) as error:
                left.append(f"{piece}: {error}")
                continue
            except torch.cuda.OutOfMemoryError:
                left.append(f"{piece}: the GPU's memory does not hold all its copies")
                continue
            finally:
                progress.advance(task)
            append_rows(folder, SUITE, [{**row, **environment}])
            refresh_latest(folder, SUITE)
    keys = {piece.key for piece in wanted}
    rows = [row for row in read_rows(folder / latest_name(SUITE)) if _key(row) in keys]
    return _tell(rows, left, folder, console)


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
