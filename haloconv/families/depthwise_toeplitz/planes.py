"""What the kernels share: planes of images in shared memory (planes.cuh)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from haloconv import support
from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.problem import Problem, Request, TensorForm

GROUP_BYTES = 16  # of columns
FEWEST_THREADS = 128  # of a block
_RESERVED_BYTES = 1024  # of shared memory, for each block
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding


class Planes(NamedTuple):
    """How planes of a tensor lie in shared memory; the fields of ``Staged`` in planes.cuh."""

    image: int
    channel: int
    row: int
    col: int
    images: int
    height: int
    copies: int
    rows: int
    row_bytes: int
    left: int
    skipped: int
    copied: int

    @property
    def plane_bytes(self) -> int:
        return self.rows * self.row_bytes


def planes(
    side: TensorForm,
    shape: tuple[int, int, int, int],
    rows: int,
    inside: tuple[int, int],
    columns: tuple[int, int],
    itemsize: int,
) -> Planes:
    """``rows`` rows of a tensor of ``shape`` as groups of columns.

    ``inside`` is the range of rows that may lie inside the image. ``columns`` are the groups before column 0, and all.
    """
    left, groups = columns
    copies = shape[3] * itemsize // copy_bytes(side, shape[3], itemsize)
    begin, end = (min(max(row, 0), rows) for row in inside)
    image, channel, row, col = side.strides
    places = (groups * GROUP_BYTES, left * GROUP_BYTES, begin, max(end - begin, 0))
    return Planes(image, channel, row, col, shape[0], shape[2], copies, rows, *places)


def in_terms(problem: Problem) -> bool:
    """Whether fp32 is multiplied as two TF32 values (terms.cuh)."""
    return problem.dtype == torch.float32 and problem.precision == "tf32x3"


def element(problem: Problem) -> str:
    """The device code's name of what is multiplied."""
    return "hc::tf32x3" if in_terms(problem) else ELEMENTS[problem.dtype]


def groups_of(cols: int, itemsize: int) -> int:
    """Groups that hold so many columns."""
    return ceil_div(cols * itemsize, GROUP_BYTES)


def copy_bytes(side: TensorForm, cols: int, itemsize: int) -> int:
    """Bytes of the largest copy that rows of ``cols`` columns are made of."""
    extents = [extent * itemsize for extent in (*side.strides[:3], cols)]
    for size in (16, 8, 4):
        if side.aligned and side.strides[3] == 1 and not any(extent % size for extent in extents):
            return size
    return itemsize


def why_no_bands(request: Request) -> str | None:
    """None if the layer is one for bands on tensor cores, else a sentence that says why not."""
    problem = request.problem
    reason = support.why_no_tensor_core_products(problem, ("tf32", "tf32x3"))
    if reason is not None:
        return reason
    if problem.c_per_group != 1:
        return f"each group has {problem.c_per_group} input channels; depthwise_toeplitz takes one"
    if problem.stride != (1, 1) or problem.dilation != (1, 1):
        return "bands are for filters without stride and dilation"
    if problem.r * problem.s <= 9:
        return "the filter has no more than 9 taps"
    if problem.r * problem.s > _MOST_PRODUCTS:
        return f"the filter has more than {_MOST_PRODUCTS} taps, too many for one sum"
    if max(problem.w, problem.q) > FEWEST_THREADS:
        return f"a row has more than {FEWEST_THREADS} columns, one for each thread that copies"
    return None


def blocks_that_fit(smem_bytes: int, max_smem: int) -> int:
    """Blocks of a multiprocessor, as far as its shared memory goes."""
    return (max_smem + _RESERVED_BYTES) // (smem_bytes + _RESERVED_BYTES)
