"""A batch of rims as one small convolution: transposed where rims are upright, on the family that runs the interior.

Kernels cut the output into rows of up to 256 pixels. An upright rim, one pixel wide and 510 high, say, would fill one
pixel in 64; so rows and columns of its strip, filter and outputs change places. What is here says how, and who runs it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from haloconv import plan as plans
from haloconv.choose.choice import choose
from haloconv.families import FAMILIES
from haloconv.layout import Layout, strides_of
from haloconv.precision import torch_precision
from haloconv.problem import ConvSpec, Direction, FourSides, Pair, Problem
from haloconv.rims import Cut, Piece

Tensor = torch.Tensor
Batch = tuple[Piece, ...]


def is_upright(batch: Batch, cut: Cut) -> bool:
    """Whether rows and columns change places: in rims that are higher than wide, beside an interior."""
    rows, columns = batch[0].rows, batch[0].columns
    return cut.padded is not None and rows.end - rows.begin > columns.end - columns.begin


def spec_of(batch: Batch, spec: ConvSpec, upright: bool) -> ConvSpec:
    """The convolution of a batch, as its tensors are given to it."""
    top, bottom, left, right = padding_of(batch)
    if not upright:
        return spec._replace(padding=(top, bottom, left, right))
    stride, dilation = (spec.stride[1], spec.stride[0]), (spec.dilation[1], spec.dilation[0])
    return spec._replace(stride=stride, padding=(left, right, top, bottom), dilation=dilation)


def oriented(tensor: Tensor, upright: bool) -> Tensor:
    """(N, C, H, W) as (N, C, W, H), or a tensor back from there, for upright rims: a view."""
    return tensor.transpose(2, 3) if upright else tensor


def padding_of(batch: Batch) -> FourSides:
    """The zeros around all pieces of a batch: where these differ (Cut.outside), as many as the one with most has."""
    top, bottom, left, right = (max(sides) for sides in zip(*(piece.padding for piece in batch), strict=True))
    return top, bottom, left, right


def windows_of(y: Tensor, batch: Batch) -> Tensor:
    """The outputs of a batch of rims, (N, rims, K, p, q): a view of y, so that one launch reads or writes all."""
    places = [(piece.rows.begin, piece.columns.begin) for piece in batch]
    n, k, row, column = y.stride()
    return _strided(y, (n, 0, k, row, column), places, (y.shape[0], y.shape[1], *_outputs(batch)))


def _outputs(batch: Batch) -> Pair:
    rows, columns = batch[0].rows, batch[0].columns
    return rows.end - rows.begin, columns.end - columns.begin


def _strided(tensor: Tensor, strides: tuple[int, ...], places: list[Pair], shape: tuple[int, ...]) -> Tensor:
    """Windows (N, windows, K, p, q) that begin at these rows and columns, one or two of them: of strides, a view."""
    n, apart, k, row, column = strides
    first, *others = (down * row + across * column for down, across in places)
    assert len(others) < 2
    apart += others[0] - first if others else 0
    size = (shape[0], len(places), *shape[1:])
    return tensor.as_strided(size, (n, apart, k, row, column), tensor.storage_offset() + first)


def packed_windows(dy: Tensor, batch: Batch, upright: bool) -> Tensor:
    """A copy of the outputs of a batch of rims, (N * rims, K, p, q), or (N * rims, K, q, p) of upright ones.

    It is stored in the order of dy, so that kernels may read it by TMA. Where pieces have fewer zeros before or behind
    them than the batch, outputs that these would give are zeros, too.
    """
    windows = windows_of(dy, batch)
    n, count, k, p, q = windows.shape
    top, bottom, left, right = padding_of(batch)
    own = batch[0].padding
    p, q = p + top - own[0] + bottom - own[1], q + left - own[2] + right - own[3]
    shape = (n * count, k, *((q, p) if upright else (p, q)))
    packed = dy.new_empty_strided(shape, strides_of(shape, plans.layout_of(dy)))
    view = oriented(packed, upright).unflatten(0, (n, count))
    if view.shape != windows.shape:
        packed.zero_()
        places = [(top - piece.padding[0], left - piece.padding[2]) for piece in batch]
        view = _strided(packed, view.stride(), places, (n, k, *windows.shape[3:]))
    view.copy_(windows)
    return packed


class Asked(NamedTuple):
    """The rims of a shard in one direction: of ``images`` of so many ``channels``, and a filter (K, C/G, R, S).

    ``layout`` is that of the problem. The last two stand for settings that the choice depends on.
    """

    direction: Direction
    cut: Cut
    spec: ConvSpec
    images: int
    channels: int
    w_shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device: torch.device
    precision: str = ""
    generation: int = 0


class Posed(NamedTuple):
    """A batch of rims as it is convolved: a strip (N * rims, C, h, w), or (N * rims, C, w, h) where it is upright."""

    batch: Batch
    upright: bool
    strip_shape: tuple[int, ...]
    spec: ConvSpec


def posed(asked: Asked) -> tuple[Posed, ...]:
    """Each batch, in dgrad those of what is outside.

    It is on the family that runs the interior, if "auto" chooses and that family takes the strip.
    Rims are too small for rules that were read off whole layers: these would leave them to PyTorch.
    """
    return _posed(asked._replace(precision=torch_precision(), generation=plans.generation))


@lru_cache(maxsize=4096)
def _posed(asked: Asked) -> tuple[Posed, ...]:
    found, family, taps = [], _family_of_interior(asked), asked.w_shape[2:]
    for batch in asked.cut.outside if asked.direction == "dgrad" else asked.cut.batches:
        upright = is_upright(batch, asked.cut)
        extents = (batch[0].rows.length, batch[0].columns.length)
        shape = (asked.images * len(batch), asked.channels, *(extents[::-1] if upright else extents))
        spec = spec_of(batch, asked.spec, upright)
        if family != "auto":
            problem = _problem(asked, shape, (*asked.w_shape[:2], *(taps[::-1] if upright else taps)), spec)
            if FAMILIES[family].why_not(problem, asked.device) is None:
                spec = spec._replace(family=family)
        found.append(Posed(batch, upright, shape, spec))
    return tuple(found)


def _family_of_interior(asked: Asked) -> str:
    """A family of ours, or "auto" where there is none, or the user named one."""
    padded = asked.cut.padded
    if asked.spec.family != "auto" or padded is None:
        return "auto"
    shape = (asked.images, asked.channels, padded.rows.length, padded.columns.length)
    problem = _problem(asked, shape, asked.w_shape, asked.spec._replace(padding=padded.padding))
    family = choose(problem, asked.device).family
    return "auto" if family == "aten" else family


def _problem(asked: Asked, x_shape: tuple[int, ...], w_shape: tuple[int, ...], spec: ConvSpec) -> Problem:
    return plans.problem_of(asked.direction, x_shape, w_shape, spec, asked.dtype, asked.layout)
