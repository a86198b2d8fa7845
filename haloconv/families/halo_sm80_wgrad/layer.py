"""What halo_sm80_wgrad knows of a layer, and how its tensors are staged."""

from __future__ import annotations

from dataclasses import dataclass

from haloconv.families.common import ceil_div
from haloconv.problem import Problem, TensorForm


@dataclass(frozen=True)
class Reading:
    """How a tensor is staged: ``inner`` if neighbouring lanes read channels, else columns; ``vec`` elements a load."""

    inner: bool
    vec: int


@dataclass(frozen=True)
class Layer:
    """What kernels are compiled for: one layer in one type, read in one way. Image extents take no part."""

    c: int  # channels and filters of a group
    k: int
    r: int
    s: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    elem_bytes: int
    x: Reading
    y: Reading
    pixel_pairs: bool = False  # 16 bits: a word is two pixels of a row
    first_half: int = 0  # pixel_pairs: the half of its word that the first tap of a row begins with
    pieces: bool = False  # 16 bits: eight neighbouring channels are staged as they are

    @property
    def halves(self) -> int:
        """Tiles in a word."""
        return 1 if self.copied else 4 // self.elem_bytes

    @property
    def copied(self) -> bool:
        """Whether tiles are copied as they lie in memory, while the one before is multiplied."""
        return self.pixel_pairs or self.pieces

    @property
    def staged(self) -> int:
        """STAGED of work.cuh: what lies in shared memory."""
        return 1 if self.pixel_pairs else 2 if self.pieces else 0

    @property
    def word_px(self) -> int:
        """Columns in a word."""
        return 2 if self.pixel_pairs else 1

    @property
    def tap_pairs(self) -> int:
        """Pixel pairs: words of a row of the filter."""
        return ceil_div(self.s + self.first_half, 2)


def reading_of(form: TensorForm, channels: int, width: int, stride: int) -> Reading:
    """The widest loads, of at most four elements, that are whole and aligned: ``channels`` of a group, or columns.

    Columns go to ``stride`` planes, in the same way from every load.
    """
    strides = form.strides
    inner = strides[1] == 1 and strides[3] != 1
    axis, extent = (1, channels) if inner else (3, width)
    others = [stride for index, stride in enumerate(strides) if index != axis]
    for vec in (4, 2):
        whole = strides[axis] == 1 and not any(value % vec for value in (extent, *others))
        if form.aligned and whole and (inner or vec % stride == 0 or stride % vec == 0):
            return Reading(inner, vec)
    return Reading(inner, 1)


def _row_copy(form: TensorForm, width: int) -> int:
    """The 16-bit pixels of the widest copies that are whole and aligned, of rows of ``width``; 1 if there are none."""
    steps = (width, *form.strides[:3])
    whole = (vec for vec in (8, 4, 2) if not any(step % vec for step in steps))
    return next(whole, 1) if form.aligned and form.strides[3] == 1 else 1


def _has_pieces(form: TensorForm, channels: int) -> bool:
    """Whether eight neighbouring 16-bit channels of a group are a whole and aligned copy."""
    others = (channels, form.strides[0], *form.strides[2:])
    return form.aligned and form.strides[1] == 1 and not any(value % 8 for value in others)


def layer_of(problem: Problem, dy: TensorForm, x: TensorForm, copied: bool = True) -> Layer:
    """The layer of a weight gradient of tensors of these forms; with ``copied`` False never one of raw copies."""
    kind = (problem.c_per_group, problem.k_per_group, problem.r, problem.s, problem.stride, problem.dilation)
    size, stride = problem.dtype.itemsize, problem.stride[1]
    if copied and size == 2:
        copies = (_row_copy(x, problem.w), _row_copy(dy, problem.q))
        if min(copies) > 1 and problem.dilation[1] == 1 and (stride == 1 or stride % 2 == 0):
            x_rows, y_rows = (Reading(False, vec) for vec in copies)
            return Layer(*kind, size, x_rows, y_rows, pixel_pairs=True, first_half=problem.padding[2] % 2)
        if _has_pieces(x, problem.c_per_group) and _has_pieces(dy, problem.k_per_group):
            return Layer(*kind, size, Reading(True, 8), Reading(True, 8), pieces=True)
    x_reading = reading_of(x, problem.c_per_group, problem.w, stride)
    return Layer(*kind, size, x_reading, reading_of(dy, problem.k_per_group, problem.q, 1))
