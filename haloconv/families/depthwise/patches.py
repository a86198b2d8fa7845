"""What the kernels share that cut planes to patches (patches.cuh): windows, strips, their padding."""

from __future__ import annotations

from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.families.depthwise.landing import LEAST_COLS, NO_PLANES, Planes, land_whole
from haloconv.families.depthwise.layer import NO_HOPPER, Extents, is_hopper, padding
from haloconv.jit.launch import Value
from haloconv.problem import Problem, Request, TensorForm

EDGE = 8  # of a patch, in pixels
PIECE_BYTES = 16  # of a patch's row
ELEM_BYTES = 2
THREADS = 128  # of a block
_PRODUCT_COLS = 8 * EDGE
_MOST_COLS = (THREADS - 4) * EDGE  # columns: pieces of a row and of the zeros beside it have a thread each


class Window(NamedTuple):
    """The window of a patch: its rows, and its pieces of 8 columns."""

    height: int
    pieces: int


class Side(NamedTuple):
    """How strips of a tensor land and are padded; the fields of the struct in patches.cuh."""

    planes: Planes
    row_bytes: int
    before: int
    pieces: int
    hop: int

    @property
    def fields(self) -> dict[str, Value]:
        return {**self._asdict(), "planes": self.planes._asdict()}


def window(problem: Problem) -> Window:
    """The window of a patch."""
    height, width = (EDGE + (n - 1) * dil for n, dil in zip((problem.r, problem.s), problem.dilation, strict=True))
    return Window(height, ceil_div(width, EDGE))


def why_not(request: Request) -> str | None:
    """None if strips of the tensors can land and be cut to patches, else a sentence that says why not."""
    problem = request.problem
    if not is_hopper(request):
        return NO_HOPPER
    if problem.dtype.itemsize != ELEM_BYTES or problem.stride != (1, 1):
        return "patches are for 16 bits and no stride"
    if any(cols % EDGE or not LEAST_COLS <= cols <= _MOST_COLS for cols in (problem.w, problem.q)):
        return f"rows are not of {LEAST_COLS} columns or more in pieces of {EDGE}"
    return None if land_whole(request, EDGE) else NO_PLANES


def padded_pieces(cols: int, pieces: int) -> int:
    """Pieces of a padded row for ``cols`` columns of outputs, eight patches at a time, with windows of ``pieces``."""
    return ceil_div(cols, _PRODUCT_COLS) * 8 + pieces - 1


def side(form: TensorForm, shape: Extents, rows: int, row_pieces: int, pads: tuple[int, int]) -> Side:
    """Strips of ``rows`` padded rows of ``row_pieces``; ``pads``: rows above and columns before the image."""
    width, before = shape[3] // EDGE, pads[1] // EDGE
    first = min(max(before, 0), row_pieces - 1)
    pieces = max(1, min(row_pieces, before + width + (pads[1] % EDGE > 0)) - first)
    image, channel, _, _ = form.strides
    planes = Planes(image, channel, shape[2], width, rows, pads[0])
    return Side(planes, row_pieces * PIECE_BYTES, before, pieces, THREADS // pieces)


def idle(rows: int, shape: Extents) -> float:
    """How many pixels patches of ``rows`` rows have for one of a plane of ``shape``."""
    return rows * ceil_div(shape[3], _PRODUCT_COLS) * _PRODUCT_COLS / (shape[2] * shape[3])


def shift(problem: Problem) -> int:
    """Columns by which the image is off the padded pieces."""
    return padding(problem)[1] % EDGE
