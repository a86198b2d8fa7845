"""Strides of a launch's tensors, and the tensor maps over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from haloconv.families.halo_sm90.conv.classes import classes_of
from haloconv.families.halo_sm90.conv.shape import BLOCK_M, UNIT_PX, joined_planes
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.jit import BoxMap, DataType, Swizzle
from haloconv.layout import Layout, neighbours_of, strides_of
from haloconv.problem import Request

Strides = tuple[int, ...]  # of four dimensions

_MAP_TYPES = {  # TMA rounds fp32 to TF32
    torch.float32: DataType.TFLOAT32,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}
_SWIZZLES = {32: Swizzle.B32, 64: Swizzle.B64, 128: Swizzle.B128}
_X_POINTER, _Y_POINTER, _HALO_POINTER = 0, 2, 5  # of a launch


@dataclass(frozen=True)
class Halo:
    """Rows that stand above and below the image, ``top`` of them above: a tensor with strides in elements, as NCHW."""

    strides: Strides
    top: int
    rows: int


@dataclass(frozen=True)
class Operands:
    """Strides in elements: of the gathered tensor and the result as NCHW, of the filter as [filter][channel][r][s].

    ``w_group`` is from one group's filters to the next one's.
    """

    x: Strides
    w: Strides
    w_group: int
    y: Strides
    halo: Halo | None = None

    def split_k(self, tiling: Tiling, layout: Layout) -> Operands:
        """The operands of split-K: each range of the channels is a group, whose result are dense partial sums."""
        form = tiling.form
        shape = (form.n, form.splits * form.filters, form.vertical.out_extent, form.horizontal.out_extent)
        return replace(self, w_group=form.channels * self.w[1], y=strides_of(shape, layout))


def operands_of(request: Request) -> Operands:
    """The operands of every launch of a request that leaves its channels in one sum."""
    w_k, w_c, w_r, w_s = request.second.strides
    w = (w_k, w_c, w_r, w_s) if request.problem.direction == "fprop" else (w_c, w_k, w_r, w_s)
    group, y = request.problem.k_per_group * w_k, request.result_strides
    return Operands(request.first.strides, w, group, y, _halo_of(request) if request.modes[0] == "halo" else None)


def _halo_of(request: Request) -> Halo:
    problem, layout = request.problem, neighbours_of(request.first.strides)
    top, bottom = problem.padding[:2]
    shape = (problem.n, problem.c, top + bottom, problem.w)
    return Halo(strides_of(shape, layout), top, top + bottom)


def tensor_maps(dtype: torch.dtype, tiling: Tiling, operands: Operands) -> dict[str, BoxMap]:
    """The maps that the kernel reads, by their names in its struct."""
    found = {"x_map": _x_map(dtype, tiling, operands), "y_map": _y_map(dtype, tiling, operands)}
    if operands.halo is not None:
        found["halo_map"] = _halo_map(dtype, tiling, operands, operands.halo)
    return {name: each for name, each in found.items() if each is not None}


def _x_map(dtype: torch.dtype, tiling: Tiling, operands: Operands) -> BoxMap | None:
    """Boxes of a chunk of channels: rows of pixels where they go right into a slot, else raw tiles of 32 pixels."""
    shape, form, storage = tiling.shape, tiling.form, tiling.storage
    if not shape.boxes:
        return None
    size = storage.elem_bytes
    chunk = shape.chunk_bytes // size
    x_n, x_c, x_h, x_w = (stride * size for stride in operands.x)
    rows, cols = form.vertical.in_extent, form.horizontal.in_extent
    if storage.x_inner:
        extents, strides = (form.channels, form.groups, cols, rows, form.n), (form.channels * size, x_w, x_h, x_n)
        box, swizzle = (chunk, 1, tiling.line.box_px, 1, 1), _SWIZZLES[shape.chunk_bytes]
    else:
        planes = joined_planes(shape, storage)
        if storage.x_joined:  # one row: of as many channels as it takes until one is aligned again
            rows, cols, x_h = 1, (planes - 1) * x_c // size + rows * cols, 16
        extents = (cols, rows, form.channels // planes, form.groups, form.n)
        strides = (x_h, planes * x_c, form.channels * x_c, x_n)
        box, swizzle = (UNIT_PX, 1, chunk // planes, 1, 1), _SWIZZLES[UNIT_PX * size]
    kind = _MAP_TYPES[dtype] if shape.terms == 1 else DataType.FLOAT32
    return BoxMap(kind, extents, strides, box, swizzle, pointer=_X_POINTER)


def _halo_map(dtype: torch.dtype, tiling: Tiling, operands: Operands, halo: Halo) -> BoxMap | None:
    """Boxes as those of the image, of rows above and below it."""
    rows = replace(tiling.form.vertical, in_extent=halo.rows)
    of_halo = replace(tiling, form=replace(tiling.form, vertical=rows))
    found = _x_map(dtype, of_halo, replace(operands, x=halo.strides))
    return found and replace(found, pointer=_HALO_POINTER)


def _y_map(dtype: torch.dtype, tiling: Tiling, operands: Operands) -> BoxMap | None:
    """Boxes as halo_sm90/write.cuh keeps them in its buffers."""
    form, storage = tiling.form, tiling.storage
    if not tiling.y_boxes:
        return None
    size = storage.y_bytes
    y_n, y_k, y_row, y_col = (stride * size for stride in operands.y)
    rows, cols = form.vertical.out_extent, form.horizontal.out_extent
    if storage.y_inner:
        row_bytes = min(128, BLOCK_M // tiling.shape.packs * size)
        extents, strides = (form.filters, form.groups, cols, rows, form.n), (form.filters * size, y_col, y_row, y_n)
        if form.interleaves:
            row_bytes, step = classes_of(form, storage).alike * size, form.horizontal.out_step
            extents, strides = (form.filters, step, cols // step, rows, form.n), (y_col, step * y_col, y_row, y_n)
        box, swizzle = (row_bytes // size, 1, 128 // size, 1, 1), _SWIZZLES[row_bytes]
    else:
        planes = tiling.y_planes
        if tiling.lead:  # one row: of as many filters as it takes until one is aligned again
            rows, cols, y_row = 1, ((planes - 1) * y_k + (rows - 1) * y_row) // size + cols, 16
        extents = (cols, rows, form.filters // planes, form.groups, form.n)
        strides = (y_row, planes * y_k, form.filters * y_k, y_n)
        box, swizzle = (128 // size, 1, 16, 1, 1), _SWIZZLES[128]
    stored = DataType.FLOAT32 if size == 4 else _MAP_TYPES[dtype]
    return BoxMap(stored, extents, strides, box, swizzle, pointer=_Y_POINTER)
