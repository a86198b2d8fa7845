"""Whether a record that came with the package may be followed here.

Its family must give about PyTorch's result for the very problem, once in a process.
"""

from __future__ import annotations

import warnings

from haloconv.choose.measuring import ONE_AT_A_TIME, measuring
from haloconv.choose.records import Record, shelf_of
from haloconv.device import is_capturing
from haloconv.families.base import Config
from haloconv.problem import Request

_trusted: set[Record] = set()


def knows(record: Record) -> bool:
    """Whether the record is trusted already, or says nothing about kernels of ours."""
    return record.family == "aten" or record in _trusted


def examine(record: Record, request: Request, config: Config) -> bool:
    """Run the config that the record chose, and trust the record if the result is right; else forget the record."""
    code = measuring()
    if code is None or is_capturing(request.device):
        return False
    with ONE_AT_A_TIME:
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
