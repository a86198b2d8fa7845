"""Rows that were not measured on today's sources, and what has to run again for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from haloconv.bench.results import ResultRow
from haloconv.families import FAMILIES
from haloconv.families.closure import source_of
from haloconv.report.networks import network_name

ASKED_FOR = "asked for"  # the reason of a choice that the user made


class Run(NamedTuple):
    """How a layer of a suite ran: ``family`` is the one asked for by name, or ``"auto"``."""

    case: str
    precision: str
    layout: str
    family: str


def is_stale(row: ResultRow) -> bool:
    """Whether what decided the row's result has changed since, or the row does not say what it was."""
    source = row.get("source")
    return source is None or source != source_of(str(row.get("kernel")))


def stale_runs(rows: Iterable[ResultRow]) -> dict[Run, list[str]]:
    """The directions of every run that has stale rows, in the rows' order."""
    found: dict[Run, list[str]] = {}
    for row in rows:
        if is_stale(row):
            run = Run(str(row["case"]), str(row["precision"]), str(row["layout"]), _family_asked(row))
            found.setdefault(run, []).append(str(row["direction"]))
    return found


def stale_networks(rows: Iterable[ResultRow]) -> set[tuple[str, str, str]]:
    """Name, precision and layout of every network that has a stale row."""
    return {
        (network_name(str(row["case"])), str(row["precision"]), str(row["layout"])) for row in rows if is_stale(row)
    }


def _family_asked(row: ResultRow) -> str:
    asked = row.get("reason") == ASKED_FOR and row["family"] in FAMILIES
    return str(row["family"]) if asked else "auto"
