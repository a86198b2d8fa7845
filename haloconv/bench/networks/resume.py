"""Which compiled networks are still to be timed, and which of them end within the time that there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from haloconv.bench.networks.compiled import Piece, variants_of
from haloconv.bench.networks.network import Effort
from haloconv.bench.results import ResultRow, key_of
from haloconv.bench.stale import is_stale

COMPARED = ("gpu", "torch", "cudnn", "cuda_runtime")
"""What of the environment a row must share with today's. Neither commit nor driver: a row compares what ran beside each
other in one process."""


def left_to_do(
    pieces: Iterable[Piece], rows: Iterable[ResultRow], environment: dict[str, str], effort: Effort
) -> list[Piece]:
    """The pieces without a row that has all variants, of this GPU, PyTorch, cuDNN and CUDA, and of today's sources."""
    known: dict[tuple[object, ...], set[str]] = {}
    for row in rows:
        if all(row.get(name) == environment.get(name) for name in COMPARED) and not is_stale(row):
            known.setdefault(key_of(row), set()).update(cast("dict[str, Any]", row["variants"]))
    return [
        piece
        for piece in pieces
        if not known.get(piece.key, set()) >= {str(each) for each in variants_of(piece.direction, effort)}
    ]


def expected_s(piece: Piece, rows: Sequence[ResultRow], effort: Effort) -> float:
    """The seconds that a piece took when it last ran, with or without a search as now, be it cut short or not.

    Without a row of its own it is as long as the longest of the same network and direction, else of the direction, is
    0 where nothing is known: then it is tried.
    """
    alike = [row for row in rows if row.get("searched") == effort.search and row["direction"] == piece.direction]
    alike = [row for row in alike if isinstance(row.get("seconds"), (int, float))]
    own = [row for row in alike if key_of(row) == piece.key]
    if own:
        return _seconds(max(own, key=lambda row: str(row["date"])))
    network = [row for row in alike if row["case"] == piece.setting.case.name]
    return max((_seconds(row) for row in network or alike), default=0.0)


def _seconds(row: ResultRow) -> float:
    return float(cast("float", row["seconds"]))
