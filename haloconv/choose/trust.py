"""Whether a record that came with the package may be followed here.

Its kernel has a stamp that was made on this GPU model and covers the present sources: ``stamped.json`` lists these, and
``python -m tools.stamps`` writes it. Else its family must give about PyTorch's result for the very problem, once in a
process.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import TypedDict

from haloconv.choose.measuring import measuring
from haloconv.choose.records import Record, shelf_of
from haloconv.device import is_capturing
from haloconv.families.base import Config
from haloconv.problem import Request

STAMPED = Path(__file__).with_name("stamped.json")

_trusted: set[Record] = set()


class Stamped(TypedDict):
    """The GPU models on which a kernel was verified, and the hash of its device code."""

    gpus: list[str]
    source: str


@cache
def stamped() -> dict[str, Stamped]:
    """The stamps that hold, by kernel."""
    stamped: dict[str, Stamped] = json.loads(STAMPED.read_text(encoding="utf-8"))
    return stamped


def has_stamp(record: Record) -> bool:
    """Whether the kernel of the record was verified on the record's GPU model, with the code that was measured.

    Its device code is compared, which the record was found by. What else a stamp covers takes half a second to hash:
    the list is written, and held against the stamps by a test, for the sources that it comes with.
    """
    stamp = stamped().get(record.kernel)
    return stamp is not None and record.gpu in stamp["gpus"] and record.source == stamp["source"]


def knows(record: Record) -> bool:
    """Whether the record needs no look: no kernel of ours, one with a stamp, or one that was looked at already."""
    return record.family == "aten" or record in _trusted or has_stamp(record)


def examine(record: Record, request: Request, config: Config) -> bool:
    """Run the config that the record chose, and trust the record if the result is right; else forget the record."""
    code = measuring()
    if code is None or is_capturing(request.device):
        return False
    complaint = code.complaint_about(request, record.family, config)
    if complaint is None:
        _trusted.add(record)
        return True
    shelf_of(request.facts).discard(record)
    if complaint:
        warnings.warn(
            f"haloconv: a shipped record is not followed: {record.family} for {request.problem}: {complaint}",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


def forget_trust() -> None:
    """Look at shipped records again."""
    _trusted.clear()
