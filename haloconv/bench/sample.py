"""A random sample of depthwise, few-channel and grouped layers, to find where ``auto`` is slower than PyTorch.

The suite holds layers that somebody chose; a rule read off them may be wrong between them. These problems are drawn
over the extents that vision networks have, one direction, precision and memory order each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from haloconv.bench.layer import LAYOUTS
from haloconv.bench.suite import PRECISIONS, Case
from haloconv.choose.choice import choose, config_of
from haloconv.families import FAMILIES
from haloconv.layout import Layout
from haloconv.problem import DIRECTIONS, Direction, Pair, Problem, dense_request
from haloconv.report import Row

LEAST_RATIO = 0.9
"""What no problem of the sample may fall below, as a ratio to PyTorch's speed."""

_ELEMENTS = 1 << 24  # of the larger of input and output, at most
_LEAST_ELEMENTS = 1 << 19
_PRODUCTS = 1 << 35  # multiplies, at most: the float64 reference computes them, too


class Drawn(NamedTuple):
    """One problem: a layer, and how it is to run."""

    case: Case
    direction: Direction
    precision: str
    layout: Layout

    @property
    def problem(self) -> Problem:
        """The problem, without bias."""
        case, (dtype, products) = self.case, PRECISIONS[self.precision]
        (n, c, h, w), (rows, cols) = case.input, case.padding
        padding = (rows, rows, cols, cols)
        r, s = case.filter
        return Problem(
            self.direction, n, c, h, w, case.filters, r, s, case.stride, padding, case.dilation, case.groups,
            dtype=dtype, layout=self.layout, precision=products,
        )  # fmt: skip


def sample(count: int, seed: int) -> list[Drawn]:
    """``count`` problems, depthwise, grouped and stems in turns; the same for the same seed."""
    rng = random.Random(seed)
    kinds = (_depthwise, _grouped, _stem)
    return [
        Drawn(
            _reasonable(rng, kinds[i % len(kinds)]),
            rng.choice(DIRECTIONS),
            rng.choice(tuple(PRECISIONS)),
            rng.choice(tuple(LAYOUTS)),
        )
        for i in range(count)
    ]


def compile_ahead(drawn: Iterable[Drawn], device: torch.device) -> None:
    """Compile the kernels that ``auto`` takes for the problems, side by side: one after another they take minutes."""

    def bind(each: Drawn) -> None:
        request = dense_request(each.problem, device)
        choice = choose(each.problem, device)
        FAMILIES[choice.family].bind(request, config_of(choice, request))

    with ThreadPoolExecutor() as pool:
        list(pool.map(bind, drawn))


def slower(rows: Iterable[Row]) -> list[Row]:
    """The timed rows below ``LEAST_RATIO``, the slowest first."""
    return sorted(
        (row for row in rows if row.ratio is not None and row.ratio < LEAST_RATIO), key=lambda row: row.known_ratio
    )


def _reasonable(rng: random.Random, kind: Callable[[random.Random], Case]) -> Case:
    """A layer large enough that not the launch is measured, and small enough for the float64 reference."""
    while True:
        case = kind(rng)
        n, c, h, w = case.input
        largest = max(n * c * h * w, n * case.filters * h * w // case.stride[0] ** 2)
        if _LEAST_ELEMENTS <= largest <= 2 * _ELEMENTS and max(case.filter) <= 2 * min(h, w):
            return case


def _depthwise(rng: random.Random) -> Case:
    channels = rng.choice((16, 32, 48, 64, 96, 144, 192, 240, 384, 576, 768))
    multiplier = rng.choice((1, 1, 1, 1, 2))
    taps = rng.choice((3, 3, 3, 5, 5, 7, 9, 13, 21, 31))
    filter_extents = rng.choice(((taps, taps), (taps, taps), (taps, taps), (1, taps), (taps, 1)))
    stride, dilation = rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 1, 2, 4)) if taps <= 7 else 1
    extent = rng.choice((14, 28, 38, 56, 64, 75, 112, 128, 160))
    filters = channels * multiplier
    return _case(rng, "depthwise", _Shape(channels, filters, filter_extents, extent, stride, dilation, channels))


def _grouped(rng: random.Random) -> Case:
    per_group = rng.choice((4, 8, 8, 16, 16, 24, 32, 64))
    groups = rng.choice((2, 4, 8, 16, 32, 64))
    taps, dilation = rng.choice((1, 3, 3, 3, 3, 5)), rng.choice((1, 1, 1, 2))
    extent = rng.choice((7, 14, 28, 33, 56, 64, 112))
    channels = per_group * groups
    stride = rng.choice((1, 1, 1, 2))
    return _case(rng, "grouped", _Shape(channels, channels, (taps, taps), extent, stride, dilation, groups))


def _stem(rng: random.Random) -> Case:
    channels, filters = rng.choice((1, 2, 3, 3, 3, 4, 6, 8)), rng.choice((16, 24, 32, 48, 64, 64, 96, 128))
    taps, stride = rng.choice(((3, 1), (3, 2), (3, 2), (5, 2), (7, 2), (7, 2), (7, 4), (4, 4), (11, 4), (16, 16)))
    extent = rng.choice((96, 128, 160, 192, 224, 224, 256, 299))
    return _case(rng, "stem", _Shape(channels, filters, (taps, taps), extent, stride))


_NAME = re.compile(
    r"(?P<kind>\w+) (?P<n>\d+)x(?P<c>\d+)x(?P<h>\d+)x(?P<w>\d+) k(?P<k>\d+) (?P<r>\d+)x(?P<s>\d+) "
    r"s(?P<stride>\d+)(?: p(?P<rows>\d+)x(?P<cols>\d+))? d(?P<dilation>\d+) g(?P<groups>\d+)"
)


def read_case(name: str) -> Case:
    """The layer that a drawn one's name describes. Raises ValueError if it is no such name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"no name of a drawn layer: {name!r}")
    value = {key: int(text) for key, text in found.groupdict().items() if key != "kind" and text is not None}
    taps, stride, dilation = (value["r"], value["s"]), value["stride"], value["dilation"]
    padding = (value["rows"], value["cols"]) if "rows" in value else _same_padding(taps, stride, dilation)
    extents = (value["n"], value["c"], value["h"], value["w"])
    return Case(name, extents, value["k"], taps, (stride, stride), padding, (dilation, dilation), value["groups"])


def _same_padding(taps: Pair, stride: int, dilation: int) -> Pair:
    """Padding that keeps extents; none for patches."""
    rows, cols = (0 if stride >= each else dilation * (each - 1) // 2 for each in taps)
    return rows, cols


class _Shape(NamedTuple):
    """A layer on square images, before their number is drawn."""

    channels: int
    filters: int
    taps: Pair
    extent: int
    stride: int
    dilation: int = 1
    groups: int = 1


def _case(rng: random.Random, kind: str, shape: _Shape) -> Case:
    """A layer padded to keep its extents (patches: not at all), of as many images as stay within _ELEMENTS."""
    channels, filters, taps, extent, stride, dilation, groups = shape
    height, width = extent, rng.choice((extent, extent, extent + rng.choice((-1, 3, 8)), 2 * extent))
    rows, cols = _same_padding(taps, stride, dilation)
    image = height * width * max(channels, filters // stride**2)
    images = max(1, min(rng.choice((1, 8, 32, 64, 128)), _ELEMENTS // image))
    products = filters * (channels // groups) * taps[0] * taps[1] * height * width // stride**2
    images = max(1, min(images, _PRODUCTS // products))
    name = f"{kind} {images}x{channels}x{height}x{width} k{filters} {taps[0]}x{taps[1]} s{stride} d{dilation} g{groups}"
    return Case(
        name,
        (images, channels, height, width),
        filters,
        taps,
        (stride, stride),
        (rows, cols),
        (dilation, dilation),
        groups,
    )
