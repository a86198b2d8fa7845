"""A convolution cut into an interior, whose taps stay inside one shard of the image, and rims, whose taps reach out.

Arithmetic alone: which outputs a shard computes of its own rows and columns, and where the strips of the others come
from. The shards of an axis are given by their bounds: ``(0, 5, 5, 9)`` are three, of rows 0 to 4, none, and 5 to 8. An
image that is not sharded is one shard, whose rims read what its padding wraps, mirrors or repeats.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, chain, groupby, takewhile
from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.problem import PADDING_MODES, FourSides, PaddingMode, Pair, output_extent

Bounds = tuple[int, ...]
"""Where the shards of an axis begin and, last, where the last of them ends."""
Place = tuple[int, int]
"""A shard of an image: its index among the shards of rows, and among those of columns."""
NOBODY = -1
"""The owner of zeros."""


class Axis(NamedTuple):
    """One axis of a convolution, all shards together; ``before`` and ``after`` are its padding in pixels."""

    extent: int
    taps: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    mode: PaddingMode = "zeros"

    @property
    def outputs(self) -> int:
        return output_extent(self.extent, self.before + self.after, self.taps, self.stride, self.dilation)

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """The positions that the outputs from ``begin`` to ``end`` reach; those outside the image are padding."""
        first = begin * self.stride - self.before
        return first, first + (end - begin - 1) * self.stride + self.dilation * (self.taps - 1) + 1

    def source(self, position: int) -> int:
        """The pixel that stands at a position, by the rules of torch.nn.functional.pad."""
        if self.mode == "circular":
            return position % self.extent
        if self.mode == "reflect":
            position %= max(2 * (self.extent - 1), 1)
            return min(position, 2 * (self.extent - 1) - position)
        return min(max(position, 0), self.extent - 1)


class Run(NamedTuple):
    """``length`` pixels of the shard ``owner``: from ``start`` on, each ``step`` (1, -1 or 0) after the one before.

    ``inside`` if they are the reading shard's own, each at its own place.
    """

    owner: int
    start: int
    length: int
    step: int = 1
    inside: bool = False


class Window(NamedTuple):
    """The outputs of a shard from ``begin`` to ``end``, counted from its first; what they read, and zeros around it."""

    begin: int
    end: int
    runs: tuple[Run, ...]
    padding: Pair = (0, 0)

    @property
    def length(self) -> int:
        """Pixels that are read."""
        return sum(run.length for run in self.runs)


class Sides(NamedTuple):
    """A shard's outputs along one axis: ``all`` of them, and those ``before``, in and after the ``interior``.

    ``padded`` is what the shard would read of itself for all, with zeros for what others have: its outputs in
    ``interior`` are right. Without an interior that and the other windows are None.
    """

    all: Window
    before: Window | None
    interior: Window | None
    after: Window | None
    padded: Window | None


class Piece(NamedTuple):
    """Outputs of a shard that one small convolution computes, whose input is each run of rows by each of columns."""

    rows: Window
    columns: Window

    @property
    def padding(self) -> FourSides:
        return (*self.rows.padding, *self.columns.padding)

    def rectangles(self) -> Iterator[tuple[int, int, Run, Run]]:
        """Each run of rows by each of columns: its first row and column in the strip, and the two runs."""
        for top, down in zip(_starts(self.rows.runs), self.rows.runs, strict=True):
            for left, across in zip(_starts(self.columns.runs), self.columns.runs, strict=True):
                yield top, left, down, across


class Cut(NamedTuple):
    """What one shard computes: ``outputs`` rows and columns, an interior unless it is None, and rims.

    ``interior`` are the outputs that are right in the result of ``padded``, a convolution of the shard alone. What the
    others lack there is what their rims read elsewhere than ``inside`` the shard. Rims of a batch read and compute as
    many rows and columns, as those above and below mostly do: one convolution of a batch of images serves them.

    Gradients of strips are those of ``outside``: of an image that is one shard, pieces that read what is not ``inside``
    alone, with zeros in the place of that. Pieces of a batch there differ in where these zeros are: ``padding``. Where
    other shards have a part of the strips, whose gradients they get as they sent them, it is ``batches``.
    """

    outputs: Pair
    interior: Piece | None
    padded: Piece | None
    batches: tuple[tuple[Piece, ...], ...]
    outside: tuple[tuple[Piece, ...], ...]

    @property
    def rims(self) -> Iterator[Piece]:
        return chain.from_iterable(self.batches)


def axis_of(extent: int, taps: int, stride: int, dilation: int, padding: Pair, mode: PaddingMode) -> Axis:
    """An axis, checked as torch.nn.functional.pad does: circular padding of at most the extent, reflected of less."""
    most = {"circular": extent, "reflect": extent - 1}.get(mode)
    if mode not in PADDING_MODES:
        raise ValueError(f"padding_mode must be one of {PADDING_MODES}, not {mode!r}")
    if most is not None and max(padding) > most:
        raise RuntimeError(f"{mode} padding of {max(padding)} pixels needs an image of more than its {extent}")
    return Axis(extent, taps, stride, dilation, *padding, mode)


def even_bounds(extent: int, shards: int) -> Bounds:
    """The bounds by which DTensor and torch.chunk divide: shards of one extent, then a smaller one, then empty ones."""
    size = ceil_div(extent, shards)
    return tuple(min(index * size, extent) for index in range(shards + 1))


def output_bounds(axis: Axis, inputs: Bounds) -> Bounds:
    """The bounds of outputs where each belongs to the shard that has the pixel under the middle of its filter."""
    middle = axis.dilation * (axis.taps - 1) // 2 - axis.before

    def first_output(bound: int) -> int:
        if bound in (0, axis.extent):
            return axis.outputs if bound else 0
        return min(max(ceil_div(bound - middle, axis.stride), 0), axis.outputs)

    return tuple(first_output(bound) for bound in inputs)


@lru_cache(maxsize=4096)
def sides_of(axis: Axis, inputs: Bounds, outputs: Bounds, index: int) -> Sides:
    """How the outputs of shard ``index`` are cut along one axis."""
    begin, end = outputs[index : index + 2]
    low, high = inputs[index : index + 2]
    whole = _window(axis, inputs, index, (begin, end), begin)
    is_edge = axis.mode == "zeros"
    first = begin if is_edge and low == 0 else max(begin, ceil_div(low + axis.before, axis.stride))
    reach = axis.dilation * (axis.taps - 1)
    last = end if is_edge and high == axis.extent else min(end, (high - 1 - reach + axis.before) // axis.stride + 1)
    if first >= last or low == high:
        return Sides(whole, None, None, None, None)
    before = _window(axis, inputs, index, (begin, first), begin) if begin < first else None
    after = _window(axis, inputs, index, (last, end), begin) if last < end else None
    interior = _window(axis, inputs, index, (first, last), begin)
    start, stop = (position - low for position in axis.span(begin, end))
    own = Run(index, max(start, 0), min(stop, high - low) - max(start, 0), inside=True)
    padded = Window(0, end - begin, (own,), (max(-start, 0), max(stop - (high - low), 0)))
    return Sides(whole, before, interior, after, padded)


@lru_cache(maxsize=4096)
def cut_of(axes: tuple[Axis, Axis], inputs: tuple[Bounds, Bounds], outputs: tuple[Bounds, Bounds], place: Place) -> Cut:
    """How the outputs of one shard of an image are cut: rims of full width above and below, the others between them."""
    rows, columns = (sides_of(*each) for each in zip(axes, inputs, outputs, place, strict=True))
    extents = (rows.all.end, columns.all.end)
    if 0 in extents:
        return Cut(extents, None, None, (), ())
    if not (_is_one_run(rows.interior, place[0]) and _is_one_run(columns.interior, place[1])):
        whole = ((Piece(rows.all, columns.all),),)
        return Cut(extents, None, None, whole, whole)
    assert rows.interior and rows.padded and columns.interior and columns.padded
    across = _batches([Piece(each, columns.all) for each in (rows.before, rows.after) if each is not None])
    down = _batches([Piece(rows.interior, each) for each in (columns.before, columns.after) if each is not None])
    inner, padded = Piece(rows.interior, columns.interior), Piece(rows.padded, columns.padded)
    batches = (*across, *down)
    return Cut(extents, inner, padded, batches, batches if _asks(batches, place) else _outside(axes, rows, columns))


class HaloRows(NamedTuple):
    """Rows outside a shard that stand right above and below it: ``at[rim, run]`` is where a run of a rim begins there.

    All others of its ``rows`` are zeros.
    """

    at: dict[tuple[Piece, Run], int]
    rows: int


@lru_cache(maxsize=4096)
def halo_of(cut: Cut, place: Place) -> HaloRows | None:
    """The rows above and below a shard that its outputs read, wherever they are from; not to be changed.

    None if there are none, or if other shards have some of the columns that are read: rows are whole.
    """
    across = [rim for rim in cut.rims if (rim.columns.begin, rim.columns.end) == (0, cut.outputs[1])]
    if cut.padded is None or not across:
        return None
    (above, below), at = cut.padded.rows.padding, {}
    for rim in across:
        columns = rim.columns.runs
        if any(run.owner != place[1] for run in columns) or sum(run.inside for run in columns) != 1:
            return None
        is_above = rim.rows.begin == 0
        runs = [*takewhile(lambda run: not run.inside, rim.rows.runs if is_above else reversed(rim.rows.runs))]
        row = rim.rows.padding[0] if is_above else above + below - rim.rows.padding[1]
        for run in runs:
            at[rim, run] = row if is_above else row - run.length
            row += run.length if is_above else -run.length
        if row != above:
            return None
    return HaloRows(at, above + below)


@lru_cache(maxsize=4096)
def reads_outside(cut: Cut) -> tuple[bool, bool]:
    """Whether outputs read rows, and columns, that stand outside the shard and are no zeros."""
    rims = [*cut.rims]
    rows, columns = ([run for rim in rims for run in rim[axis].runs] for axis in (0, 1))
    return any(map(_is_outside, rows)), any(map(_is_outside, columns))


def _is_outside(run: Run) -> bool:
    return not run.inside and run.owner != NOBODY


def _asks(batches: tuple[tuple[Piece, ...], ...], place: Place) -> bool:
    """Whether other shards have some of what rims read."""
    runs = (
        (run, at) for rim in chain(*batches) for window, at in zip(rim[:2], place, strict=True) for run in window.runs
    )
    return any(run.owner not in (at, NOBODY) for run, at in runs)


def _outside(axes: tuple[Axis, Axis], rows: Sides, columns: Sides) -> tuple[tuple[Piece, ...], ...]:
    """Rows that are not inside, of all columns; then columns that are not, of rows that are."""
    assert rows.padded is not None
    above, beside = (
        [each for side in (of.before, of.after) if side for each in _elsewhere(side)] for of in (rows, columns)
    )
    across = [Piece(each, columns.all) for each in above]
    down = [Piece(rows.padded, each) for each in beside]
    return (*_aligned(across, axes[0].stride), *_aligned(down, axes[1].stride))


def _elsewhere(window: Window) -> Iterator[Window]:
    """What a window reads beside its shard's own: parts of it, each with zeros in the place of all else."""
    at, length = 0, window.length
    for inside, runs in groupby(window.runs, lambda run: run.inside or run.owner == NOBODY):
        part = tuple(runs)
        end = at + sum(run.length for run in part)
        if not inside:
            before, after = window.padding
            yield Window(window.begin, window.end, part, (before + at, after + length - end))
        at = end


def _aligned(pieces: list[Piece], stride: int) -> list[tuple[Piece, ...]]:
    """Pieces at two sides as one batch, if they read and compute as much and outputs can be shifted by pixels."""
    forms = {
        (*(len(range(each.begin, each.end)) for each in piece), piece.rows.length, piece.columns.length)
        for piece in pieces
    }
    return [tuple(pieces)] if len(pieces) == 2 and len(forms) == stride == 1 else [(each,) for each in pieces]


def _batches(rims: list[Piece]) -> list[tuple[Piece, ...]]:
    """The rims of two sides as one batch, if one convolution serves both."""
    forms = {(each.rows.length, each.columns.length, each.padding) for each in rims}
    return [tuple(rims)] if len(forms) == 1 else [(each,) for each in rims]


def window_of(axis: Axis, inputs: Bounds, index: int, outputs: tuple[int, int]) -> Window:
    """The window of some outputs that shard ``index`` computes, whichever it owns, counted from the first of them."""
    return _window(axis, inputs, index, outputs, outputs[0])


def _is_one_run(window: Window | None, owner: int) -> bool:
    return window is not None and len(window.runs) == 1 and window.runs[0].owner == owner


def _starts(runs: tuple[Run, ...]) -> list[int]:
    return list(accumulate((run.length for run in runs[:-1]), initial=0)) if runs else []


def _window(axis: Axis, inputs: Bounds, index: int, outputs: tuple[int, int], origin: int) -> Window:
    """The window of some outputs of shard ``index``, counted from ``origin``."""
    begin, end = outputs
    if begin == end:
        return Window(begin - origin, end - origin, ())
    first, last = axis.span(begin, end)
    zeros = (0, 0)
    if axis.mode == "zeros":
        zeros = (max(-first, 0), max(last - axis.extent, 0))
        if max(first, 0) >= min(last, axis.extent):
            return Window(begin - origin, end - origin, (Run(NOBODY, 0, last - first),))
    positions = range(first + zeros[0], last - zeros[1])
    return Window(begin - origin, end - origin, tuple(_runs(axis, inputs, index, positions)), zeros)


def _runs(axis: Axis, inputs: Bounds, index: int, positions: range) -> Iterator[Run]:
    """The pixels that shard ``index`` reads at some positions as runs, as few as there can be."""
    run: Run | None = None
    own = range(inputs[index], inputs[index + 1])
    for position in positions:
        pixel = axis.source(position)
        owner = bisect_right(inputs, pixel) - 1
        at, inside = pixel - inputs[owner], position in own
        if run is not None and (run.owner, run.inside) == (owner, inside):
            step = at - (run.start + run.step * (run.length - 1))
            if step == run.step or (run.length == 1 and step in (1, -1, 0)):
                run = Run(owner, run.start, run.length + 1, step, inside)
                continue
        if run is not None:
            yield run
        run = Run(owner, at, 1, 1, inside)
    if run is not None:
        yield run
