"""Random legal layers and sizes, for the fuzzers on the CPU and on the GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from haloconv.problem import ConvSpec
from tests.cases import Case


def random_layer(rng: random.Random, name: str = "random", *, largest_filter: int = 31) -> Case:
    """A legal layer with the smallest image that it takes.

    Filters up to 7 and now and then far larger ones, strides and dilations up to 5, four paddings up to the filter's
    reach, groups from dense to depthwise with a multiplier.
    """
    taps = [_taps(rng, largest_filter) for _ in range(2)]
    d0, d1 = (rng.choice((1, 1, 2, 3, 5)) if extent <= 7 else 1 for extent in taps)
    s0, s1 = (rng.choice((1, 1, 2, 3, 4, 5)) for _ in range(2))
    reach = [d * (extent - 1) for d, extent in zip((d0, d1), taps, strict=True)]
    top, bottom, left, right = (rng.choice((0, rng.randint(0, max(1, reach[axis])))) for axis in (0, 0, 1, 1))
    c, k, groups = _channels(rng)
    spec = ConvSpec((s0, s1), (top, bottom, left, right), (d0, d1), groups)
    h, w = smallest_image(spec, taps[0], taps[1])
    return Case(name, "drawn at random", (1, c, h, w, k, taps[0], taps[1]), spec, bias=rng.random() < 0.5)


def _taps(rng: random.Random, largest: int) -> int:
    return rng.randint(8, largest) if largest >= 8 and rng.random() < 0.05 else rng.randint(1, min(7, largest))


def _channels(rng: random.Random) -> tuple[int, int, int]:
    """C, K and the number of groups."""
    kind = rng.choice(("dense", "dense", "grouped", "depthwise"))
    if kind == "dense":
        return rng.randint(1, 40), rng.randint(1, 40), 1
    groups = rng.randint(2, 12)
    if kind == "grouped":
        return groups * rng.randint(1, 6), groups * rng.randint(1, 6), groups
    return groups, groups * rng.choice((1, 1, 2, 3)), groups


def smallest_image(spec: ConvSpec, r: int, s: int) -> tuple[int, int]:
    """The smallest H and W for which the filter fits into the padded image."""
    top, bottom, left, right = spec.padding
    rows, cols = (d * (taps - 1) + 1 for d, taps in zip(spec.dilation, (r, s), strict=True))
    return max(1, rows - top - bottom), max(1, cols - left - right)


def sized(layer: Case, n: int, extra_rows: int, extra_cols: int, **fields: Any) -> Case:
    """The layer for a batch of ``n`` images that are larger than the smallest one by the given rows and columns."""
    _, c, _, _, k, r, s = layer.extents
    h, w = smallest_image(layer.spec, r, s)
    extents = (n, c, h + extra_rows, w + extra_cols, k, r, s)
    return replace(layer, name=f"{layer.name} {extents}", extents=extents, **fields)
