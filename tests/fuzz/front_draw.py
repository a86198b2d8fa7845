"""Draws of the functions beside conv2d: a call with all that PyTorch lets it be given, as one line that replays it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tests.families import FACTS, forms_tiles
from tests.fronts import FRONTS, Front, front
from tests.fuzz.draw import ARCHS, Draw, line_of, parsed

FUNCTIONS = tuple(each.name for each in FRONTS)
PRECISIONS = {
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp64": (torch.float64, None),
}
FORMS = ("contiguous", "neighbours", "strided", "offset", "expanded")
_FAMILIES = ("auto", "auto", *(name for name, facts in FACTS.items() if facts.fronts))


@dataclass(frozen=True)
class FrontDraw:
    """One call of a function beside conv2d, forward and all gradients.

    ``x`` is (N, C, ...) whether the call is ``batched`` or not, ``w`` the filter's shape. ``padding`` has a number for
    each dimension, or, of conv1d, (left, right). ``first``, ``second`` and ``third`` are the forms of x, w and dy:
    channels as neighbours, every second of a row, one element beyond a boundary of 16 bytes, one image or filter
    repeated. ``arch`` and ``sm_count`` are the emulated GPU's; on a GPU they mean nothing.
    """

    function: str
    precision: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...] = (0,)
    groups: int = 1
    bias: bool = False
    batched: bool = True
    first: str = "contiguous"
    second: str = "contiguous"
    third: str = "contiguous"
    family: str = "auto"
    seed: int = 0
    arch: str = "sm_90a"
    sm_count: int = 4

    def __str__(self) -> str:
        """The line that `parsed_line` reads: every field that is not its default."""
        return line_of(self)

    @property
    def one(self) -> Front:
        return front(self.function)

    @property
    def filters(self) -> int:
        return self.w[1] * self.groups if self.one.transposed else self.w[0]

    @property
    def image(self) -> tuple[int, ...]:
        """The extents of y behind its channels, by PyTorch's formulas."""
        sides = [2 * each for each in self.padding] if len(self.padding) == len(self.stride) else [sum(self.padding)]
        along = zip(self.x[2:], self.w[2:], self.stride, sides, self.dilation, strict=True)
        if self.one.transposed:
            added = self.output_padding
            return tuple(
                (e - 1) * s - both + d * (t - 1) + more + 1
                for (e, t, s, both, d), more in zip(along, added, strict=True)
            )
        return tuple((e + both - d * (t - 1) - 1) // s + 1 for e, t, s, both, d in along)

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.x[1] and self.groups > 1

    @property
    def is_legal(self) -> bool:
        """Whether PyTorch takes it."""
        if min(*self.x[1:], *self.w, self.groups) < 1 or (not self.batched and self.x[0] != 1):
            return False
        if self.one.transposed:
            fits = self.w[0] == self.x[1] and self.x[1] % self.groups == 0
            along = zip(self.output_padding, self.stride, self.dilation, strict=True)
            fits = fits and all(more < max(step, spread) for more, step, spread in along)
        else:
            fits = self.w[1] * self.groups == self.x[1] and self.w[0] % self.groups == 0
            fits = fits and self.output_padding == (0,)
        return fits and min(self.image) >= 1

    @property
    def products(self) -> int:
        """Products of the definition, about, or elements where those are more."""
        image = self.x[2:] if self.one.transposed else self.image
        filled = math.prod(self.w) * math.prod(image) * self.x[0]
        return max(filled, math.prod(self.x), self.x[0] * self.filters * math.prod(self.image))

    def options(self) -> dict[str, Any]:
        """PyTorch's arguments by name; the padding may have sides that differ."""
        found: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        if self.one.transposed:
            found["output_padding"] = self.output_padding
        return found | {"groups": self.groups}


def parsed_line(line: str) -> Draw | FrontDraw:
    """The draw that a line describes. Raises ValueError for a word that is no field, or a wrong value."""
    of_front = any(word.startswith("function=") for word in line.split())
    found: Draw | FrontDraw = parsed(line, FrontDraw if of_front else Draw)
    return found


def front_draws(seed: int | str, functions: tuple[str, ...], most_work: int) -> Iterator[FrontDraw]:
    """Calls without end, the functions alternating. A seed always gives the same."""
    rng = random.Random(f"{seed} fronts")
    while True:
        for function in functions:
            drawn = (_drawn(rng, front(function)) for _ in range(10_000))
            yield next(each for each in drawn if each.is_legal and each.products <= most_work)


def _drawn(rng: random.Random, one: Front) -> FrontDraw:
    """A call, which may be none that PyTorch takes."""
    dims = len(one.image)
    groups, deep, wide = _channels(rng)
    taps = _taps(rng, one)
    patches = one.name == "conv3d" and rng.random() < 0.35
    stride = taps if patches else _each(rng, dims, (1, 1, 2, 3, 8) if dims == 1 else (1, 1, 2, 3))
    dilation = _each(rng, dims, (1,) if patches else (1, 1, 2, 5) if dims == 1 else (1, 1, 2))
    padding = (0,) * dims if patches else _each(rng, dims, (0, 0, 1, 2, 4))
    reach = dilation[0] * (taps[0] - 1)
    if one.name == "conv1d" and rng.random() < 0.5:  # causal, "same", or any sides
        padding = rng.choice(((reach, 0), (reach // 2, reach - reach // 2), (rng.randint(0, 9), rng.randint(0, 9))))
    image = tuple(rng.choice((tap, rng.randint(1, 12), 2 * tap)) if dims > 1 else rng.randint(1, 90) for tap in taps)
    if one.name == "conv3d" and taps[0] == 1 and rng.random() < 0.5:
        image = (1, *image[1:])
    batched = rng.random() < 0.85
    count = rng.choice((1, 2, 3, 9)) if rng.random() < 0.95 else 0
    family = rng.choice(_FAMILIES)
    c, k = groups * deep, groups * wide
    return FrontDraw(
        one.name,
        rng.choice(tuple(PRECISIONS)),
        (count if batched else 1, c, *image),
        ((c, wide) if one.transposed else (k, deep)) + taps,
        stride,
        padding,
        dilation,
        _each(rng, dims, (0, 0, 1)) if one.transposed else (0,),
        groups,
        bias=rng.random() < 0.5,
        batched=batched,
        first=_form(rng),
        second=_form(rng),
        third=_form(rng),
        family=family,
        seed=rng.randrange(1 << 16),
        arch="sm_90a" if forms_tiles(family) else rng.choice(ARCHS),  # where halo_sm90 runs
        sm_count=rng.choice((1, 3, 4, 4, 7)),
    )


def _channels(rng: random.Random) -> tuple[int, int, int]:
    """The number of groups, and the channels and filters of each: as often one group as several, as depthwise."""
    kind = rng.choice(("dense", "dense", "grouped", "depthwise"))
    if kind == "depthwise":
        return rng.choice((2, 8, 16, rng.randint(2, 40))), 1, 1
    if kind == "grouped":
        return rng.randint(2, 4), rng.choice((1, 3, 8)), rng.choice((1, 3, 8))
    return 1, rng.choice((rng.randint(1, 9), 8, 16, 32)), rng.choice((rng.randint(1, 9), 8, 16, 32))


def _taps(rng: random.Random, one: Front) -> tuple[int, ...]:
    if one.name == "conv3d":
        few = [rng.choice((1, 2, 3)) for _ in range(3)]
        return rng.choice((tuple(few), (1, few[1], few[2]), (few[0], 1, 1)))
    most = (1, 2, 3, 4, 7, 11, 16, 31) if len(one.image) == 1 else (1, 2, 3, 4, 5)
    return _each(rng, len(one.image), most)


def _each(rng: random.Random, dims: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """A value for each dimension: the same for all, half of the time."""
    first = rng.choice(values)
    return (first,) * dims if rng.random() < 0.5 else tuple(rng.choice(values) for _ in range(dims))


def _form(rng: random.Random) -> str:
    return rng.choice(("contiguous", "contiguous", "neighbours", *FORMS))


def _with(draw: FrontDraw, name: str, value: Any) -> FrontDraw:
    return replace(draw, **{name: value})


def simpler_front(draw: FrontDraw) -> Iterator[FrontDraw]:
    """Draws that are one step simpler. Not all of them are legal."""
    for name in ("bias", "first", "second", "third", "family", "arch", "sm_count", "batched"):
        default: Any = next(each.default for each in fields(FrontDraw) if each.name == name)
        if getattr(draw, name) != default:
            yield _with(draw, name, default)
    for name in ("stride", "dilation", "padding", "output_padding"):
        plain = (1 if name in ("stride", "dilation") else 0,) * len(getattr(draw, name))
        if getattr(draw, name) != plain:
            yield _with(draw, name, plain)
    for at, extent in enumerate(draw.x):
        for fewer in sorted({1, extent // 2, extent - 1} & set(range(1, extent))):
            if at != 1:
                yield replace(draw, x=(*draw.x[:at], fewer, *draw.x[at + 1 :]))
    for at in range(2, len(draw.w)):
        if draw.w[at] > 1:
            yield replace(draw, w=(*draw.w[:at], draw.w[at] - 1, *draw.w[at + 1 :]))
    for groups, deep, wide in _fewer_channels(draw):
        w = (groups * deep, wide) if draw.one.transposed else (groups * wide, deep)
        yield replace(draw, groups=groups, x=(draw.x[0], groups * deep, *draw.x[2:]), w=(*w, *draw.w[2:]))


def _fewer_channels(draw: FrontDraw) -> Iterator[tuple[int, int, int]]:
    groups, deep, wide = draw.groups, draw.x[1] // draw.groups, draw.filters // draw.groups
    for fewer in sorted({1, groups // 2} & set(range(1, groups))):
        yield fewer, deep, wide
    for fewer in sorted({1, deep // 2} & set(range(1, deep))):
        yield groups, fewer, wide
    for fewer in sorted({1, wide // 2} & set(range(1, wide))):
        yield groups, deep, fewer
