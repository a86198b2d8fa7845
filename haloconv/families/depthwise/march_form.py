"""What the marches (march.cu, march_wgrad.cu) share: what is marched over, what a thread owns, how rows move.

A thread owns a few neighbouring columns, and in ``nhwc`` a few neighbouring channels, and marches down a strip of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.layout import strides_of
from haloconv.problem import Problem, Request, TensorForm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

THREADS = 128
"""Threads of a block (march.cu, march_wgrad.cu)."""

_MOST_TAPS = 49  # weights, or sums in wgrad, that stand in registers
_MOST_VECTORS = 32  # of a thread's part of a row: a bit for each
_VECTOR_BYTES = 16
_REGISTER_FILE = 65536  # of a multiprocessor
_MOST_REGISTERS = 255  # of a thread
_OTHER_REGISTERS, _STRIDED_REGISTERS = 32, 10  # addresses, masks, counters; what ptxas adds to four strided columns
_WGRAD_REGISTERS, _WGRAD_SPREAD = 20, 1.25  # a second tensor's addresses and masks; what ptxas adds to spread taps
_WGRAD_CHANNEL_REGISTERS = 4
_WASTE = 1.35  # columns beyond the row's end that a better tiling may compute, against the tiling with the fewest


@dataclass(frozen=True)
class Tiling:
    """What a thread owns and how it waits.

    ``cols`` outputs of a row, ``channels`` neighbouring channels, ``ahead`` rows under way. ``min_blocks`` blocks must
    fit a multiprocessor, which caps the registers of a thread. ``strip_rows`` 0: the cost model decides.
    """

    cols: int
    channels: int
    ahead: int
    min_blocks: int
    strip_rows: int = 0

    def __str__(self) -> str:
        return f"q{self.cols} c{self.channels} a{self.ahead} m{self.min_blocks}"


@dataclass(frozen=True)
class Form:
    """What is marched over: the input is x, in dgrad dy; threads own places of the output: y, dx, and dy in wgrad.

    ``channel_lanes``: neighbouring lanes have neighbouring channels, else columns.
    """

    problem: Problem
    input: TensorForm
    output: TensorForm
    channel_lanes: bool

    @property
    def scatters(self) -> bool:
        """Whether an input row is scattered to output rows (dgrad), not gathered."""
        return self.problem.direction == "dgrad"

    @property
    def in_shape(self) -> tuple[int, int, int, int]:
        """(N, channels, rows, columns) of the input."""
        return self.problem.y_shape if self.scatters else self.problem.x_shape

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """(N, channels, rows, columns) of the output."""
        return self.problem.x_shape if self.scatters else self.problem.y_shape

    @property
    def phase(self) -> int:
        """Scattering: the left padding modulo the stride."""
        return self.problem.padding[2] % self.problem.stride[1] if self.scatters else 0

    @property
    def _before(self) -> int:
        return (self.problem.s - 1) * self.problem.dilation[1] // self.problem.stride[1]

    def window(self, cols: int) -> int:
        """Input columns that ``cols`` outputs meet (``Columns`` in march_axes.cuh)."""
        stride = self.problem.stride[1]
        if self.scatters:
            return self._before + (self.phase + cols - 1) // stride + 1
        return (cols - 1) * stride + (self.problem.s - 1) * self.problem.dilation[1] + 1

    @property
    def first_column(self) -> int:
        """The input column that the first thread's window begins with."""
        left = self.problem.padding[2]
        return (left - self.phase) // self.problem.stride[1] - self._before if self.scatters else -left

    @property
    def ring_rows(self) -> int:
        """Output rows that a thread has in registers."""
        met = ceil_div(self.problem.r, self.problem.stride[0])
        return met * self.problem.stride[0] if self.scatters else met


class Vectors(NamedTuple):
    """How rows move (march_row.cuh): columns of a vector of the input and of the output, and the input's lead."""

    input: int
    lead: int
    output: int


def _widest(most: int, *multiples: int) -> int:
    """The largest power of two up to ``most`` that divides all."""
    while any(each % most for each in multiples):
        most //= 2
    return most


def _channel_vector(form: Form) -> int:
    """Neighbouring channels that one access may move on both sides."""
    sides = (form.input, form.output)
    if not form.channel_lanes or form.problem.k_per_group > 1 or any(side.strides[1] != 1 for side in sides):
        return 1
    if not all(side.aligned for side in sides):
        return 1
    strides = [stride for side in sides for axis, stride in enumerate(side.strides) if axis != 1]
    return _widest(_VECTOR_BYTES // form.problem.dtype.itemsize, form.out_shape[1], *strides)


def _columns(side: TensorForm, most: int, *multiples: int) -> int:
    """Columns of a vector of one side."""
    return _widest(most, *side.strides[:3], *multiples) if side.strides[3] == 1 and side.aligned else 1


def vectors(form: Form, tiling: Tiling) -> Vectors:
    """The widest accesses along rows that alignment allows."""
    if form.channel_lanes:
        return Vectors(1, 0, 1)
    most, stride = _VECTOR_BYTES // form.problem.dtype.itemsize, form.problem.stride[1]
    moved = tiling.cols // stride if form.scatters else tiling.cols * stride  # input columns from thread to thread
    vec = _columns(form.input, most, moved, form.in_shape[3])
    return Vectors(vec, form.first_column % vec, _columns(form.output, most, tiling.cols, form.out_shape[3]))


def _words(cols: int, lead: int, vec: int, elem_bytes: int) -> int:
    """Registers of a row of ``cols`` places: of each vector the least aligned power of two around what is needed."""
    total = 0
    for start in range(0, lead + cols, vec):
        first, last, moved = max(lead - start, 0), min(vec, lead + cols - start) - 1, 1
        while first // moved != last // moved:
            moved *= 2
        total += ceil_div(moved * elem_bytes, 4)
    return total


def registers(form: Form, tiling: Tiling) -> int:
    """About what a thread needs: weights, sums (in wgrad the reverse), rows under way, a row unpacked, addresses."""
    problem, window, row = form.problem, form.window(tiling.cols), vectors(form, tiling)
    elem_bytes = problem.dtype.itemsize * tiling.channels  # one side of a vector is 1
    words = float(_words(window, row.lead, row.input, elem_bytes))
    if problem.direction == "wgrad":
        words += _words(tiling.cols, 0, row.output, elem_bytes) / problem.stride[0]
    unpacked = 0 if problem.dtype == torch.float32 else window / 2
    held = tiling.channels * (problem.r * problem.s + tiling.cols * form.ring_rows + unpacked)
    needed, plain = held + words * tiling.ahead + _OTHER_REGISTERS, problem.stride == problem.dilation == (1, 1)
    if problem.direction == "wgrad":
        needed += _WGRAD_REGISTERS + _WGRAD_CHANNEL_REGISTERS * tiling.channels
        return int(needed * (1 if plain else _WGRAD_SPREAD))
    return int(needed) + (0 if form.scatters or plain else _STRIDED_REGISTERS * tiling.cols // 4)


def invalid(form: Form, tiling: Tiling) -> str | None:
    """Why a tiling does not run the form, or None."""
    if _channel_vector(form) % tiling.channels:
        return f"neighbouring channels come in groups of {_channel_vector(form)}, not {tiling.channels}"
    if form.scatters and tiling.cols % form.problem.stride[1]:
        return f"{tiling.cols} columns are no multiple of the stride {form.problem.stride[1]}"
    moved = vectors(form, tiling)
    count = ceil_div(form.window(tiling.cols) + moved.lead, moved.input)
    if count > _MOST_VECTORS:
        return f"a thread would read {count} vectors of a row; it has bits for {_MOST_VECTORS}"
    allowed = min(_REGISTER_FILE // (THREADS * tiling.min_blocks) // 8 * 8, _MOST_REGISTERS)
    needed = registers(form, tiling)
    return f"needs about {needed} registers; it may have {allowed}" if needed > allowed else None


_UP_TO_4_COLUMNS = (
    Tiling(4, 1, 3, 6), Tiling(4, 1, 3, 5), Tiling(4, 1, 2, 5), Tiling(4, 1, 3, 4), Tiling(4, 1, 2, 4),
    Tiling(4, 1, 2, 3), Tiling(4, 1, 1, 2), Tiling(2, 1, 1, 2),
)  # fmt: skip
_OF_8_COLUMNS = (Tiling(8, 1, 3, 5), Tiling(8, 1, 2, 4), Tiling(8, 1, 2, 3), Tiling(8, 1, 2, 2))
_CHANNELS = (Tiling(4, 2, 2, 5), Tiling(4, 2, 2, 4), Tiling(4, 2, 2, 3), Tiling(4, 2, 2, 2))

# Best of a sweep on an NVIDIA H200 (2026-11-22, maps of 56 and 112): by lanes along channels, bytes of an element and
# role, for filters of up to 9, 25 and 49 taps; None: not measured.
_MEASURED: dict[tuple[bool, int, str], tuple[Tiling | None, Tiling | None, Tiling | None]] = {
    (False, 4, "plain"): (Tiling(4, 1, 2, 6), Tiling(4, 1, 3, 4), Tiling(2, 1, 3, 4)),
    (False, 4, "strided fprop"): (Tiling(4, 1, 1, 6), None, None),
    (False, 4, "strided dgrad"): (Tiling(4, 1, 3, 6), None, None),
    (False, 4, "wgrad"): (Tiling(8, 1, 3, 3), None, Tiling(8, 1, 1, 2)),
    (False, 2, "plain"): (Tiling(4, 1, 3, 5), Tiling(8, 1, 3, 4), Tiling(4, 1, 2, 4)),
    (False, 2, "strided fprop"): (Tiling(4, 1, 2, 6), None, None),
    (False, 2, "strided dgrad"): (Tiling(8, 1, 3, 5), None, None),
    (False, 2, "wgrad"): (Tiling(8, 1, 3, 4), None, Tiling(8, 1, 1, 2)),
    (True, 4, "plain"): (Tiling(2, 4, 2, 4), Tiling(8, 1, 2, 3), Tiling(4, 1, 3, 3)),
    (True, 4, "strided fprop"): (Tiling(2, 4, 3, 3), None, None),
    (True, 4, "strided dgrad"): (Tiling(2, 4, 2, 4), None, None),
    (True, 4, "wgrad"): (Tiling(4, 2, 3, 3), None, Tiling(8, 1, 1, 2)),
    (True, 2, "plain"): (Tiling(2, 4, 3, 4), Tiling(8, 1, 2, 3), Tiling(4, 1, 3, 3)),
    (True, 2, "strided fprop"): (Tiling(4, 2, 3, 4), None, None),
    (True, 2, "strided dgrad"): (Tiling(4, 2, 3, 4), None, None),
    (True, 2, "wgrad"): (Tiling(4, 2, 2, 4), None, Tiling(8, 1, 3, 2)),
    (True, 2, "strided wgrad"): (Tiling(4, 4, 1, 2), None, None),
}


def _measured(form: Form) -> tuple[Tiling, ...]:
    problem = form.problem
    lanes, elem_bytes, role = form.channel_lanes, problem.dtype.itemsize, f"strided {problem.direction}"
    if max(problem.stride) == 1 or (lanes, elem_bytes, role) not in _MEASURED:
        role = "wgrad" if problem.direction == "wgrad" else "plain"
    taps = problem.r * problem.s
    best = _MEASURED[lanes, elem_bytes, role][0 if taps <= 9 else 1 if taps <= 25 else 2]
    return () if best is None else (best,)


def tilings(form: Form) -> tuple[Tiling, ...]:
    """Every tiling that fits, best first. They depend on filter, dtype and alignment: new image sizes never compile."""
    strided = form.scatters and form.problem.stride[1] > 1
    others: tuple[Tiling, ...] = _UP_TO_4_COLUMNS
    if form.channel_lanes:
        others = (*_CHANNELS, *_UP_TO_4_COLUMNS)
    elif form.problem.dtype.itemsize == 2 or strided:
        others = (*_OF_8_COLUMNS, *_UP_TO_4_COLUMNS)
    step = form.problem.stride[1]
    if strided and (4 if form.channel_lanes else 8) % step:  # columns are multiples of the stride
        others = (Tiling(step, 4, 2, 3), Tiling(step, 2, 2, 4), Tiling(2 * step, 1, 2, 4), Tiling(step, 1, 1, 2))
    return tuple(tiling for tiling in (*_measured(form), *others) if invalid(form, tiling) is None)


def good_tilings(form: Form) -> list[Tiling]:
    """The tilings that compute few columns beyond the end of a row, best first; none twice."""
    found = dict.fromkeys(tilings(form))
    cols = form.out_shape[3]
    fewest = min(ceil_div(cols, tiling.cols) * tiling.cols for tiling in found)
    return [each for each in found if ceil_div(cols, each.cols) * each.cols <= _WASTE * fewest]


def best_tiling(form: Form) -> Tiling:
    """The first of ``good_tilings``."""
    return good_tilings(form)[0]


def why_not(request: Request) -> str | None:
    """None if threads can march over the problem, whatever its tensors' forms, else a sentence that says why not."""
    problem = request.problem
    if problem.r * problem.s > _MOST_TAPS:
        return f"a filter of {problem.r} x {problem.s} has more than {_MOST_TAPS} taps"
    if any(stride > 1 and dil > 1 for stride, dil in zip(problem.stride, problem.dilation, strict=True)):
        return "an axis has both a stride and a dilation"
    if problem.direction == "dgrad" and problem.k_per_group > 1:
        return "a channel has several filters, whose input gradients would have to be summed"
    x, y = (TensorForm(strides_of(shape, "nchw"), False) for shape in (problem.x_shape, problem.y_shape))
    if not tilings(Form(problem, x, y, False)):
        axis = f"{problem.s} columns of taps with stride {problem.stride[1]} and dilation {problem.dilation[1]}"
        return f"{axis} are too many for the registers of a thread"
    return None


def common_constants(form: Form, tiling: Tiling) -> dict[str, int | str]:
    """What both kernels' sources are specialised by."""
    problem, moved = form.problem, vectors(form, tiling)
    return {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "STRIDE_H": problem.stride[0],
        "STRIDE_W": problem.stride[1],
        "DIL_W": problem.dilation[1],
        "MULTIPLIER": problem.k_per_group,
        "COLS": tiling.cols,
        "CHANNELS": tiling.channels,
        "AHEAD": tiling.ahead,
        "MIN_BLOCKS": tiling.min_blocks,
        "IN_VEC": moved.input,
        "IN_LEAD": moved.lead,
        "IN_COL": column_constant(form, form.input, form.in_shape[1]),
    }


def column_constant(form: Form, side: TensorForm, channels: int) -> int:
    """Elements between neighbouring columns where a kernel's source may have them, else 0: known at run time.

    That is 1, or the channels of a dense ``nhwc`` tensor: no extent of the image.
    """
    dense = form.channel_lanes and side.strides[1] == 1 and side.strides[3] == channels
    return side.strides[3] if dense else int(side.strides[3] == 1)
