"""Result files: one JSON object per line, a file per day and suite, and for each suite the newest row of every key."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from haloconv import atomic
from haloconv.bench.suite import SUITES
from haloconv.device import gpu_stem

ResultRow = dict[str, object]

IDENTITY = ("case", "direction", "precision", "layout")
MAIN_SUITE = "suite"


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
"""The folder of a checkout's benchmarks, whose ``results`` are committed. An installed package has none."""


def results_folder(suite: Path) -> Path:
    """Where rows of a suite go: beside its file; of the package's own to the checkout, or to the working folder."""
    if suite.resolve().parent != SUITES:
        return suite.resolve().parent / "results"
    return (BENCHMARKS if BENCHMARKS.is_dir() else Path("benchmarks")) / "results"


def gpu_folder(results: Path, gpu_name: str) -> Path:
    """The folder of one GPU's results."""
    return results / gpu_stem(gpu_name)


def append_rows(folder: Path, what: str, rows: Iterable[ResultRow]) -> Path:
    """Add the rows to ``<date>-<what>.jsonl`` in ``folder``; the date is that of the first row.

    Raises ValueError if there is no row.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("there is no row to write")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{str(rows[0]['date'])[:10]}-{what}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.writelines(_line(row) for row in rows)
    return path


def latest_name(what: str) -> str:
    """The file with the newest rows of one suite: ``latest.jsonl`` for the main one, else ``latest-<what>.jsonl``."""
    return "latest.jsonl" if what == MAIN_SUITE else f"latest-{what}.jsonl"


def newest_rows(folder: Path, what: str) -> list[ResultRow]:
    """The newest row per case, direction, precision and layout of all ``<date>-<what>.jsonl``, passed or failed.

    They are in the order of their keys. Of rows of the same second the one that was written last counts.
    """
    newest: dict[tuple[object, ...], ResultRow] = {}
    for path in sorted(folder.glob(f"????-??-??-{what}.jsonl")):
        for row in read_rows(path):
            key = key_of(row)
            if key not in newest or str(row["date"]) >= str(newest[key]["date"]):
                newest[key] = row
    return [newest[key] for key in sorted(newest)]


def refresh_latest(folder: Path, what: str) -> Path:
    """Write the newest rows of a suite, made anew from its dated files, into the file ``latest_name`` says."""
    path = folder / latest_name(what)
    atomic.write_text(path, "".join(_line(row) for row in newest_rows(folder, what)))
    return path


def read_rows(path: Path) -> list[ResultRow]:
    """The rows of a result file; none if there is no file. Lines that are no row are left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and all(name in row for name in (*IDENTITY, "date")):
            rows.append(row)
    return rows


def key_of(row: ResultRow) -> tuple[object, ...]:
    """What a row is found by: its case, direction, precision and layout."""
    return tuple(row[name] for name in IDENTITY)


def _line(row: ResultRow) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
