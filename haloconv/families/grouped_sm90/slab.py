"""Both kernels of ``grouped_sm90``: slabs of 128 bytes of channels, and how they are cut (slab.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from haloconv.families.common import ceil_div
from haloconv.jit import BoxMap, DataType, Swizzle
from haloconv.problem import Problem, Request, TensorForm

ATOM_BYTES, SLAB_BYTES = 16, 128
LEAST_CAPABILITY = (9, 0)
_RESERVED_BYTES = 1 << 10  # of shared memory, for each block
_BARRIER_BYTES = 16  # of a buffer: its two barriers
_MOST_STAGES = 8
_SCHEDULERS, _SCHEDULER_REGISTERS, _MOST_REGISTERS = 4, 1 << 14, 255  # of a multiprocessor, of each, of a thread
_MOST_CHANNELS = 16  # of a group: PyTorch and the tiles of halo_sm80 were measured ahead on groups of 32
_LOADED = {torch.float32: DataType.TFLOAT32, torch.float16: DataType.FLOAT16, torch.bfloat16: DataType.BFLOAT16}
_STORED = _LOADED | {torch.float32: DataType.FLOAT32}


def atoms(problem: Problem) -> int:
    """16 bytes of channels in a group."""
    return problem.c_per_group * problem.dtype.itemsize // ATOM_BYTES


def group_tiles(problem: Problem) -> int:
    """Eights of channels in a group."""
    return problem.c_per_group // 8


def why_no_slab(request: Request, *forms: TensorForm) -> str | None:
    """None if the kernels take the request on its device, else a sentence that says why not.

    ``forms`` are those of the tensors that are read as boxes.
    """
    problem = request.problem
    size = problem.dtype.itemsize
    if request.facts.capability < LEAST_CAPABILITY:
        return "the device has no TMA (compute capability 9.0)"
    if problem.stride != (1, 1) or problem.dilation != (1, 1):
        return "the layer is strided or dilated"
    if problem.c_per_group != problem.k_per_group or problem.c_per_group % 8:
        return "the groups do not have as many channels as filters, in eights"
    if problem.c_per_group > _MOST_CHANNELS or SLAB_BYTES % (problem.c_per_group * size):
        return f"groups have more than {_MOST_CHANNELS} channels, or do not fill {SLAB_BYTES} bytes evenly"
    if not all(_has_boxes(form, size) for form in forms):
        return "channels are no neighbours at multiples of 16 bytes"
    return None


def _has_boxes(form: TensorForm, size: int) -> bool:
    steps = (form.strides[0], *form.strides[2:])
    whole = min(steps) > 0 and not any(step * size % ATOM_BYTES for step in steps)  # 0: one image seen as several
    return form.aligned and form.strides[1] == 1 and whole


@dataclass(frozen=True)
class Cut:
    """``Cut`` of grouped_sm90/slab.cuh: slabs, and images, strips and bands of each, dealt out to ``parts`` blocks."""

    problem: Problem
    rows: int
    strip_cols: int

    @property
    def slab_groups(self) -> int:
        """Groups of a slab."""
        return SLAB_BYTES // ATOM_BYTES // atoms(self.problem)

    @property
    def slabs(self) -> int:
        return ceil_div(self.problem.groups, self.slab_groups)

    @property
    def _extents(self) -> tuple[int, int]:
        """Rows and columns of what a tap's result belongs to: the output, or dy."""
        one = self.problem
        return (one.h, one.w) if one.direction == "dgrad" else (one.p, one.q)

    @property
    def x_cols(self) -> int:
        """Columns of a stage of x."""
        return ceil_div(min(self.strip_cols, self._extents[1]) + self.problem.s - 1, 8) * 8

    @property
    def _strips_bands(self) -> tuple[int, int]:
        rows, cols = self._extents
        return ceil_div(cols, self.strip_cols), ceil_div(rows, self.rows)

    def parts(self, blocks: int) -> int:
        """Blocks of a slab where ``blocks`` run at a time."""
        strips, bands = self._strips_bands
        return max(1, min(self.problem.n * strips * bands, blocks // self.slabs))

    def fields(self, parts: int, top: int, left: int, stages: int) -> dict[str, int]:
        """The scalars of ``Cut`` in slab.cuh."""
        strips, bands = self._strips_bands
        one = self.problem
        per_block, longer = divmod(one.n * strips * bands, parts)
        return {
            **{"slabs": self.slabs, "images": one.n, "strips": strips, "bands": bands},
            **{"per_block": per_block, "longer": longer, "groups": one.groups},
            **{"top": top, "left": left, "x_cols": self.x_cols, "stages": stages},
        }

    def box_bytes(self, cols: int) -> int:
        """Bytes of the rows of a stage, of ``cols`` columns each."""
        return self.rows * cols * SLAB_BYTES

    def boxes(
        self, shape: tuple[int, ...], strides: tuple[int, ...], cols: int, pointer: int, stored: bool = False
    ) -> BoxMap:
        """Boxes of ``cols`` columns of a tensor, in shared memory as grouped_sm90/slab.cuh reads and writes them."""
        size = self.problem.dtype.itemsize
        n, c, h, w = shape
        kind = (_STORED if stored else _LOADED)[self.problem.dtype]
        steps = (strides[3] * size, strides[2] * size, strides[0] * size)
        return BoxMap(kind, (c, w, h, n), steps, (SLAB_BYTES // size, cols, self.rows, 1), Swizzle.B128, pointer)


def stages(max_smem_bytes: int, blocks: int, stage_bytes: int, other_bytes: int) -> int:
    """Buffers that ``blocks`` blocks of a multiprocessor have room for; fewer than two are none."""
    room = (max_smem_bytes + _RESERVED_BYTES) // blocks - _RESERVED_BYTES - other_bytes
    return min(_MOST_STAGES, room // (stage_bytes + _BARRIER_BYTES))


def registers(warps: int, blocks: int) -> int:
    """Registers of a thread, where ``blocks`` blocks of ``warps`` warps run on a multiprocessor."""
    of_scheduler = ceil_div(warps * blocks, _SCHEDULERS) * 32
    return min(_MOST_REGISTERS, _SCHEDULER_REGISTERS // of_scheduler // 8 * 8)


def smem_bytes(stages: int, stage_bytes: int, buffers: int, buffer_bytes: int) -> int:
    """Shared memory of a ring of stages and other buffers, with their barriers."""
    return stages * (stage_bytes + _BARRIER_BYTES) + buffers * (buffer_bytes + _BARRIER_BYTES)
