"""A random sample of layers, to find where ``auto`` is slower than PyTorch.

The suite holds layers that somebody chose; a rule read off them may be wrong between them. These problems are drawn
from real networks and over the extents that vision networks have, one direction, precision and memory order each.
"""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import NamedTuple, cast

import torch

from haloconv.bench.layer import LAYOUTS
from haloconv.bench.suite import PRECISIONS, SUITES, Case
from haloconv.choose.choice import choose, config_of
from haloconv.families import FAMILIES
from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel
from haloconv.problem import DIRECTIONS, Direction, Pair, Problem, dense_request

LEAST_RATIO = 0.9
"""What no problem of the sample may fall below, as a ratio to PyTorch's speed."""
BEHIND, FAR_BEHIND = 0.95, 0.85
"""The ratios that a draw's verdict counts below."""
LAYERS = SUITES / "layers.jsonl"
"""The distinct convolutions of real networks; ``python -m tools.layer_tables`` writes it."""

DRAWN: tuple[PrecisionLabel, ...] = ("fp32", "tf32", "fp16", "bf16")
"""The precisions that are drawn where none is named: draws of earlier seeds stay what they were."""
_ELEMENTS = 1 << 24  # of the larger of input and output, at most
_LEAST_ELEMENTS = 1 << 19
_PRODUCTS = 1 << 35  # multiplies, at most: the float64 reference computes them, too


class Drawn(NamedTuple):
    """One problem: a layer, and how it is to run."""

    case: Case
    direction: Direction
    precision: PrecisionLabel
    layout: Layout

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What its row is found by, as ``results.key_of`` has it."""
        return self.case.name, self.direction, self.precision, self.layout

    def __str__(self) -> str:
        return " ".join(self.key)

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


def sample(count: int, seed: int, precisions: Sequence[PrecisionLabel] = DRAWN) -> list[Drawn]:
    """``count`` problems, the kinds alternating; the same for the same seed, and the first of more are those of fewer.

    Half are dense layers: of networks (``LAYERS``, a network first and then one of its layers, as
    often as it runs) and with extents of equal chance.
    """
    rng = random.Random(seed)
    kinds = (_of_network, _depthwise, _dense, _grouped, _of_network, _stem, _dense)
    return [
        Drawn(
            _reasonable(rng, kinds[i % len(kinds)]),
            rng.choice(DIRECTIONS),
            rng.choice(precisions),
            rng.choice(tuple(LAYOUTS)),
        )
        for i in range(count)
    ]


def read_drawn(text: str) -> list[Drawn]:
    """The problems of a text, one a line as ``str`` has it; empty lines count for nothing.

    Raises ValueError for a line that is none.
    """
    return [_read_line(line) for line in text.splitlines() if line.strip()]


def _read_line(line: str) -> Drawn:
    name, *words = line.strip().rsplit(" ", 3)
    allowed: tuple[Collection[str], ...] = (DIRECTIONS, PRECISIONS, LAYOUTS)
    if len(words) < len(allowed) or any(word not in known for word, known in zip(words, allowed, strict=True)):
        raise ValueError(f"no layer with its direction, precision and layout: {line!r}")
    direction, precision, layout = words
    return Drawn(read_case(name), cast(Direction, direction), cast(PrecisionLabel, precision), cast(Layout, layout))


def fresh_seed() -> int:
    """A seed that nobody chose."""
    return secrets.randbits(32)


def compile_ahead(drawn: Iterable[Drawn], device: torch.device) -> None:
    """Compile the kernels that ``auto`` takes for the problems, side by side: one after another they take minutes."""

    def bind(each: Drawn) -> None:
        request = dense_request(each.problem, device)
        choice = choose(each.problem, device)
        FAMILIES[choice.family].bind(request, config_of(choice, request))

    with ThreadPoolExecutor() as pool:
        list(pool.map(bind, drawn))


def verdict(ratios: Iterable[float]) -> str:
    """The line that a draw comes to, from its ratios to PyTorch's speed."""
    ratios = list(ratios)
    behind, far_behind = (sum(ratio < limit for ratio in ratios) for limit in (BEHIND, FAR_BEHIND))
    return f"{behind} of {len(ratios)} below {BEHIND}, {far_behind} below {FAR_BEHIND}"


def verdict_of_own(rows: Iterable[Mapping[str, object]]) -> str:
    """The verdict on the rows that ran on our kernels: in the others PyTorch is on both sides, and differs by noise."""
    rows = list(rows)
    own = [row for row in rows if row["family"] != "aten"]
    ratios = [float(str(row["ratio"])) for row in own if row["ratio"] is not None]
    return f"of {len(own)} of {len(rows)} on our kernels {verdict(ratios)}"


def _reasonable(rng: random.Random, kind: Callable[[random.Random], Case]) -> Case:
    """A layer large enough that not the launch is measured, and small enough for the float64 reference."""
    while True:
        case = kind(rng)
        n, c, h, w = case.input
        largest = max(n * c * h * w, n * case.filters * h * w // case.stride[0] ** 2)
        if not (_LEAST_ELEMENTS <= largest <= 2 * _ELEMENTS and max(case.filter) <= 2 * min(h, w)):
            continue
        if case.problem("fprop", "fp32", "nchw").flops <= 4 * _PRODUCTS:
            return case


@cache
def networks() -> dict[str, dict[str, int]]:
    """By network the names of its distinct layers, of one image each, and how often they run (``LAYERS``)."""
    lines = LAYERS.read_text(encoding="utf-8").splitlines()
    return {entry["network"]: entry["layers"] for entry in map(json.loads, lines)}


def _of_network(rng: random.Random) -> Case:
    layers = networks()[rng.choice(sorted(networks()))]
    (name,) = rng.choices(list(layers), list(layers.values()))
    return _with_images(rng, "network", read_case(f"network {name}"))


def _dense(rng: random.Random) -> Case:
    """Channels and extents from a logarithmic range, every filter and stride that networks have, 1x1 most often."""
    channels, filters = (8 * round(2 ** rng.uniform(0, 7.5)) for _ in range(2))
    taps = rng.choice(((1, 1), (1, 1), (1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (7, 7), (2, 2), (1, 3), (3, 1), (1, 7)))
    stride = rng.choice((1, 1, 1, 2))
    dilation = rng.choice((1, 1, 1, 1, 2, 4)) if max(taps) > 1 and stride == 1 else 1
    extent = round(2 ** rng.uniform(2.8, 8))
    return _case(rng, "dense", _Shape(channels, filters, taps, extent, stride, dilation))


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
    r"\w+ (\d+)x(\d+)x(\d+)x(\d+) k(\d+) (\d+)x(\d+) s(\d+)(?:x(\d+))?(?: p(\d+)x(\d+))? d(\d+)(?:x(\d+))? g(\d+)"
)


def name_of_layer(case: Case) -> str:
    """A layer in one line: ``8x64x56x56 k128 3x3 s2 p1x1 d1 g1``; a stride or dilation of two values is ``s2x1``."""
    r, s = case.filter
    stride, dilation = (f"{a}" if a == b else f"{a}x{b}" for a, b in (case.stride, case.dilation))
    padding = f"{case.padding[0]}x{case.padding[1]}"
    extents = "x".join(map(str, case.input))
    return f"{extents} k{case.filters} {r}x{s} s{stride} p{padding} d{dilation} g{case.groups}"


def read_case(name: str) -> Case:
    """The layer that a kind and ``name_of_layer`` describe; without a padding it is the one that keeps extents.

    Raises ValueError if it is no such name.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"no name of a drawn layer: {name!r}")
    n, c, h, w, k, r, s, down, _, _, _, tall, _, groups = (int(text or 0) for text in found.groups())
    across, rows, cols, wide = (int(found[i]) if found[i] else None for i in (9, 10, 11, 13))
    stride, dilation = (down, across or down), (tall, wide or tall)
    padding = _same_padding((r, s), down, tall) if rows is None or cols is None else (rows, cols)
    return Case(name, (n, c, h, w), k, (r, s), stride, padding, dilation, groups)


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
    """A layer padded to keep its extents (patches: not at all)."""
    channels, filters, taps, extent, stride, dilation, groups = shape
    height, width = extent, rng.choice((extent, extent, extent + rng.choice((-1, 3, 8)), 2 * extent))
    padding = _same_padding(taps, stride, dilation)
    extents = (1, channels, height, width)
    return _with_images(
        rng, kind, Case("", extents, filters, taps, (stride, stride), padding, (dilation, dilation), groups)
    )


def _with_images(rng: random.Random, kind: str, case: Case) -> Case:
    """The layer of one image with a name, and of as many images as stay within _ELEMENTS and _PRODUCTS."""
    (_, channels, height, width), taps = case.input, case.filter[0] * case.filter[1]
    pixels = height * width // (case.stride[0] * case.stride[1])
    images = rng.choice((1, 2, 8, 32, 64, 128))
    images = max(1, min(images, _ELEMENTS // max(height * width * channels, pixels * case.filters)))
    products = case.filters * (channels // case.groups) * taps * pixels
    images = max(1, min(images, _PRODUCTS // max(1, products)))
    sized = replace(case, input=(images, channels, height, width))
    return replace(sized, name=f"{kind} {name_of_layer(sized)}")
