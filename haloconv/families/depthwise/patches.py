"""What the kernels share that cut planes to patches (patches.cuh): windows, strips, their padding."""

from __future__ import annotations

from typing import NamedTuple

from haloconv.env import DeviceFacts
from haloconv.families.common import ceil_div
from haloconv.families.depthwise.strips import padding
from haloconv.problem import Problem, TensorForm

EDGE = 8  # of a patch, in pixels
PIECE_BYTES = 16  # of a patch's row
ELEM_BYTES = 2
THREADS = 128  # of a block
SIDE_FORMAT, CUT_FORMAT = "2q8i", "4i"
_CAPABILITY = (9, 0)
_PRODUCT_COLS = 8 * EDGE
_NARROW = 48  # columns, up to which other kernels are used
_LONGEST = (THREADS - 4) * EDGE  # columns: pieces of a row and of the zeros beside it have a thread each


class Window(NamedTuple):
    """Of a patch: rows, and pieces of 8 columns."""

    height: int
    pieces: int


class Side(NamedTuple):
    """How strips of a tensor land and are padded; the fields of the struct in patches.cuh."""

    image: int
    channel: int
    extent: int
    width: int
    rows: int
    pad_top: int
    row_bytes: int
    before: int
    pieces: int
    hop: int

    @property
    def landing_bytes(self) -> int:
        """Of the rows that are in the image."""
        return min(self.rows, self.extent) * self.width * PIECE_BYTES


def window(problem: Problem) -> Window:
    """The window of a patch."""
    height, width = (EDGE + (n - 1) * dil for n, dil in zip((problem.r, problem.s), problem.dilation, strict=True))
    return Window(height, ceil_div(width, EDGE))


def why_not(
    problem: Problem, sides: tuple[tuple[TensorForm, tuple[int, int, int, int]], ...], facts: DeviceFacts
) -> str | None:
    """None if strips of these tensors, each with its shape, can land and be cut to patches, else why not."""
    if facts.capability != _CAPABILITY:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if problem.dtype.itemsize != ELEM_BYTES or problem.stride != (1, 1):
        return "patches are for 16 bits and no stride"
    if any(cols % EDGE or not _NARROW <= cols <= _LONGEST for _, (_, _, _, cols) in sides):
        return f"rows are not of {_NARROW} columns or more in pieces of {EDGE}"
    for side, (_, _, _, cols) in sides:
        if side.strides[2:] != (cols, 1) or not side.aligned or any(each % EDGE for each in side.strides[:2]):
            return "rows have gaps, or planes do not begin at multiples of 16 bytes"
    return None


def padded_pieces(cols: int, pieces: int) -> int:
    """Of a row of ``cols`` columns of patches with windows of ``pieces``: eight patches at a time."""
    return ceil_div(cols, _PRODUCT_COLS) * 8 + pieces - 1


def side(
    form: TensorForm, shape: tuple[int, int, int, int], rows: int, row_pieces: int, pad_top: int, pad_left: int
) -> Side:
    """Strips of ``rows`` padded rows of ``row_pieces``."""
    width, before = shape[3] // EDGE, pad_left // EDGE
    first = min(max(before, 0), row_pieces - 1)
    pieces = max(1, min(row_pieces, before + width + (pad_left % EDGE > 0)) - first)
    row_bytes = row_pieces * PIECE_BYTES
    return Side(*form.strides[:2], shape[2], width, rows, pad_top, row_bytes, before, pieces, THREADS // pieces)


def idle(rows: int, shape: tuple[int, int, int, int]) -> float:
    """How many pixels patches of ``rows`` rows have for one of a plane of ``shape``."""
    return rows * ceil_div(shape[3], _PRODUCT_COLS) * _PRODUCT_COLS / (shape[2] * shape[3])


def shift(problem: Problem) -> int:
    """Columns by which the image is off the padded pieces."""
    return padding(problem)[1] % EDGE


def whole(extent_bytes: int) -> int:
    """Bytes of a buffer: a multiple of 128."""
    return ceil_div(extent_bytes, 128) * 128
