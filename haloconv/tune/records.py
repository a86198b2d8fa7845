"""Result files: one JSON object per line, a file per day and purpose, and ``latest.jsonl`` with the newest of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

Record = dict[str, object]

IDENTITY = ("case", "direction", "precision", "layout")


def gpu_folder(results: Path, gpu_name: str) -> Path:
    """The folder of one GPU's results: ``NVIDIA H200`` has ``nvidia-h200``."""
    return results / re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def append_records(folder: Path, what: str, records: Iterable[Record]) -> Path:
    """Add the records to ``<date>-<what>.jsonl`` in ``folder``; the date is that of the first record.

    Raises ValueError if there is no record.
    """
    records = list(records)
    if not records:
        raise ValueError("there is no record to write")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{str(records[0]['date'])[:10]}-{what}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.writelines(_line(record) for record in records)
    return path


def refresh_latest(folder: Path, records: Iterable[Record]) -> Path:
    """Bring ``latest.jsonl`` up to date: the newest record per case, direction, precision and layout.

    Lines that cannot be read are dropped; a record replaces one of the same date.
    """
    path = folder / "latest.jsonl"
    newest: dict[tuple, Record] = {}
    for record in [*read_records(path), *records]:
        key = tuple(record[name] for name in IDENTITY)
        if key not in newest or str(record["date"]) >= str(newest[key]["date"]):
            newest[key] = record
    partial = path.with_suffix(".partial")
    partial.write_text("".join(_line(newest[key]) for key in sorted(newest)), encoding="utf-8")
    partial.replace(path)
    return path


def read_records(path: Path) -> list[Record]:
    """The records of a result file; none if there is no file. Lines that are no record are left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and all(name in record for name in (*IDENTITY, "date")):
            records.append(record)
    return records


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
