"""A failing draw made small: one greedy step after another that keeps it failing, until none does or time is up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.check import check
from tests.fuzz.draw import Draw, takes
from tests.fuzz.front_draw import FrontDraw, simpler_front
from tests.fuzz.outcome import Failure

_PLAIN = (
    "epilogue",
    "edges",
    "bias",
    "first",
    "second",
    "layout",
    "values",
    "dilation",
    "stride",
    "padding",
    "arch",
    "sm_count",
)


def shrunk(failure: Failure, device: str, limit_s: float) -> Failure:
    """The smallest failure that greedy steps reach within ``limit_s`` seconds."""
    until, seen = time.monotonic() + limit_s, {failure.draw}
    found = True
    while found:
        found = False
        for draw in simpler(failure.draw):
            if time.monotonic() >= until:
                return failure
            legal = draw.is_legal if isinstance(draw, FrontDraw) else takes(draw, device)
            if draw in seen or not legal:
                continue
            seen.add(draw)
            smaller = check(draw, device)
            if isinstance(smaller, Failure):
                failure, found = smaller, True
                break
    return failure


def simpler(draw: Draw | FrontDraw) -> Iterator[Draw | FrontDraw]:
    """Draws that are one step simpler, the largest steps first. Not all of them are legal."""
    if isinstance(draw, FrontDraw):
        yield from simpler_front(draw)
        return
    (n, c, h, w), (k, r, s), groups = draw.x, draw.filters, draw.groups
    c_each, k_each = c // groups, k // groups
    for fewer in _less(n):
        yield replace(draw, x=(fewer, c, h, w))
    for fewer in _less(groups):
        yield replace(draw, groups=fewer, x=(n, c_each * fewer, h, w), filters=(k_each * fewer, r, s))
    for fewer in _less(c_each):
        yield replace(draw, x=(n, fewer * groups, h, w))
    for fewer in _less(k_each):
        yield replace(draw, filters=(fewer * groups, r, s))
    for name in _PLAIN:
        default = next(each.default for each in fields(Draw) if each.name == name)
        if getattr(draw, name) != default:
            plain: dict[str, Any] = {name: default}
            yield replace(draw, **plain)
    for fewer in _less(h):
        yield replace(draw, x=(n, c, fewer, w))
    for fewer in _less(w):
        yield replace(draw, x=(n, c, h, fewer))
    for fewer in _less(r):
        yield replace(draw, filters=(k, fewer, s))
    for fewer in _less(s):
        yield replace(draw, filters=(k, r, fewer))
    for side, pixels in enumerate(draw.padding):
        for fewer in _less(pixels, least=0):
            top, bottom, left, right = (fewer if at == side else each for at, each in enumerate(draw.padding))
            yield replace(draw, padding=(top, bottom, left, right))


def _less(extent: int, least: int = 1) -> list[int]:
    """The least, a half, and one less."""
    return sorted({least, (extent + 1) // 2, extent - 1} & set(range(least, extent)))
