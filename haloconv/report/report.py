"""Rows with the environment they were measured in: as JSON and as one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from haloconv.report import summary
from haloconv.report.page import page_of
from haloconv.report.rows import Row
from haloconv.report.summary import FileOutcome
from haloconv.report.table import reason_of

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class Report:
    """Rows with the environment they were measured in, and sentences that a reader must know.

    ``launches`` are records of emulated launches (bench.emulation.traffic). ``files`` says what came of each problem
    file, ``tables`` are shown on the page beside the rows. A report is not ``complete`` while it is made, or if that
    was interrupted.
    """

    title: str
    environment: Mapping[str, str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    launches: list[Mapping[str, object]] = field(default_factory=list)
    files: list[FileOutcome] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    complete: bool = True

    @property
    def passed(self) -> bool:
        """True if it is complete and has rows, every check of every row passed, and no file was unusable."""
        usable = all(file.unusable is None for file in self.files)
        return self.complete and bool(self.rows) and usable and all(row.passed for row in self.rows)

    @property
    def verdict(self) -> str:
        """The sentence about the checks: how many rows passed, and whether PyTorch alone ran on both sides, untimed."""
        own = any(row.ratio is not None or row.family not in ("", "aten") for row in self.rows)
        passed, suffix = sum(row.passed for row in self.rows), "" if own else "; no kernel of haloconv ran"
        return f"{passed} of {len(self.rows)} rows passed every check{suffix}."

    def complaints(self) -> list[str]:
        """One sentence per row that failed."""
        return [f"{row.case} {row.direction}: {row.complaint}" for row in self.rows if not row.passed]

    def reasons(self) -> list[str]:
        """Why each family and config was taken, one sentence per reason, with the rows that it holds for."""
        places: dict[str, dict[str, list[str]]] = {}
        for row in self.rows:
            if row.reason:
                places.setdefault(reason_of(row), {}).setdefault(row.case, []).append(row.direction)
        return [
            f"{reason} (" + "; ".join(f"{case} {', '.join(steps)}" for case, steps in cases.items()) + ")"
            for reason, cases in places.items()
        ]

    def to_json(self) -> str:
        """One JSON object: ``title complete passed environment notes rows``, and ``files scores launches`` if any."""
        content = {
            "title": self.title,
            "complete": self.complete,
            "passed": self.passed,
            "environment": dict(self.environment),
            "notes": self.notes,
            "rows": [row.record(self.environment) for row in self.rows],
            **(summary.as_json(self.files) if self.files else {}),
            **({"launches": [dict(launch) for launch in self.launches]} if self.launches else {}),
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """One page without outside references, readable on a phone, light or dark as the reader's device asks.

        Raises ModuleNotFoundError, which says what to install, without jinja2 or matplotlib.
        """
        return page_of(self)
