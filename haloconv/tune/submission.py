"""Measurements to contribute: a file of one JSON line per problem, with every candidate's times and their origin.

``haloconv tune --submit FILE`` writes it, ``python -m tools.merge_records FILE`` of a checkout takes it in.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from haloconv.choose.records import Place, Record, parsed
from haloconv.device import DeviceFacts
from haloconv.tune.measure import Measured, Outcome

FORMAT = 1
_FACTS = ("name", "capability", "sm_count", "max_smem_bytes", "driver")


class SubmissionError(ValueError):
    """A file is no submission, or a row of it does not hold together."""


class Row(NamedTuple):
    """One line: the GPU, the record that the measurement gave, the candidates that were timed, those that were not."""

    gpu: dict[str, object]
    record: Record
    candidates: list[Measured]
    rejected: list[str]

    @property
    def place(self) -> Place:
        """What the row is found by."""
        return Place(self.record.layer, self.record.size)


def append_row(path: Path, row: Row) -> None:
    """Add a row to a file, which is made if need be. Raises OSError."""
    entry = {
        "format": FORMAT,
        "gpu": row.gpu,
        "record": asdict(row.record),
        "candidates": [each._asdict() for each in row.candidates],
        "rejected": row.rejected,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, allow_nan=False) + "\n")


def submission_of(outcome: Outcome, facts: DeviceFacts) -> Row:
    """The row of a measurement made on a GPU."""
    gpu = {name: value for name, value in json.loads(json.dumps(asdict(facts))).items() if name in _FACTS}
    return Row(gpu, outcome.record, list(outcome.candidates), list(outcome.rejected))


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file. Raises SubmissionError, which names the line, if one is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise SubmissionError(f"{path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}"
            raise SubmissionError(f"{path}:{number} is no row of haloconv tune --submit ({what})") from error
    return rows


def _row(entry: dict[str, Any]) -> Row:
    if entry["format"] != FORMAT:
        raise ValueError(f"its format is {entry['format']!r}, not {FORMAT}")
    gpu = {name: entry["gpu"][name] for name in _FACTS}
    return Row(gpu, parsed(entry["record"]), [Measured(**each) for each in entry["candidates"]], entry["rejected"])
