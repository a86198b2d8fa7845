"""What the kernels share whose planes come through shared memory (strips.cuh): strips and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from haloconv.device import DeviceFacts
from haloconv.families.base import BoundCall
from haloconv.families.common import ceil_div, named
from haloconv.families.depthwise import finish
from haloconv.families.depthwise.layer import Extents, activations
from haloconv.jit import KernelSource
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Request, TensorForm

PIECE_BYTES = 16  # of one copy
NO_ROOM = "the rows that a strip needs do not fit shared memory"
_FEWEST_THREADS = 128  # of a block
_COPY_CAPABILITY = (8, 0)  # of asynchronous copies; others of the family's kernels have none
_RESERVED_BYTES = 1024  # of shared memory, for each block
_START_UNITS = 2  # what starting a block costs, in strips
_MOST_WAVES = 8  # of blocks, unless a block may not have as many strips as that leaves it
_LEAST_TAPS, _LEAST_COLS = 10, 48  # with fewer the marches were measured as fast, or faster


class Staged(NamedTuple):
    """How strips of a tensor's planes lie in shared memory; the fields of the struct in strips.cuh."""

    image: int
    channel: int
    row: int
    extent: int
    pad_top: int
    rows: int
    spare: int
    row_bytes: int
    left: int
    width: int

    @property
    def buffer_bytes(self) -> int:
        return (self.rows + self.spare) * self.row_bytes


class Partition(NamedTuple):
    """How the strips of a channel are divided among blocks; the fields of the struct in strips.cuh."""

    channels: int
    units: int
    parts: int
    strips: int
    rows: int
    buffer_bytes: int


class Window(NamedTuple):
    """What a strip needs: ``rows`` of the tensor, the first strip's from ``pad_top`` above it, and ``spare_rows`` more.

    ``left`` pieces of zeros before each row; ``width`` columns at least, of which those outside the image are zeros;
    warps read up to column ``read``.
    """

    pad_top: int
    rows: int
    left: int
    width: int
    read: int
    spare_rows: int = 0


class Cut(NamedTuple):
    """Strips of the output, how those of the input are staged, bytes of shared memory, blocks that run at a time."""

    strips: tuple[int, int]
    side: Staged
    smem_bytes: int
    slots: int


def why_not(request: Request) -> str | None:
    """None if planes of the tensors can be copied in pieces on the device, else a sentence that says why not."""
    problem, sides = request.problem, [side for side, _ in activations(request)]
    if request.facts.capability < _COPY_CAPABILITY:
        return "the device has no asynchronous copies (compute capability 8.0)"
    if problem.stride != (1, 1) or problem.r * problem.s < _LEAST_TAPS:
        return f"the filter has a stride, or no more than {_LEAST_TAPS - 1} taps"
    if any(side.strides[3] != 1 or not side.aligned for side in sides):
        return "columns are no neighbours in memory"
    piece = PIECE_BYTES // problem.dtype.itemsize
    extents = [extent for side in sides for extent in side.strides[:3]]
    if any(extent % piece for extent in (*extents, problem.w, problem.q)) or min(problem.w, problem.q) < _LEAST_COLS:
        return f"rows are not of at least {_LEAST_COLS} columns in pieces of {piece}"
    if max(problem.w, problem.q) > _FEWEST_THREADS * piece:
        return f"a row has more than {_FEWEST_THREADS} pieces, one for each thread"
    return None


def staged(side: TensorForm, shape: Extents, window: Window, elem_bytes: int) -> Staged:
    """Strips of a tensor of ``shape`` in shared memory; rows below each other begin in different banks."""
    piece = PIECE_BYTES // elem_bytes
    copied = shape[3] // piece
    pieces = max(window.left + copied, ceil_div(window.width, piece)) | 1
    spare = window.spare_rows + ceil_div(max(0, ceil_div(window.read, piece) - pieces), pieces)
    image, channel, row, _ = side.strides
    rows = (shape[2], window.pad_top, window.rows, spare)
    return Staged(image, channel, row, *rows, pieces * PIECE_BYTES, window.left, copied)


def cut_rows(rows: int, most: int, step: int) -> tuple[int, int]:
    """How many strips ``rows`` rows are cut into, and the rows of one, a multiple of ``step`` up to about ``most``."""
    each = ceil_div(ceil_div(rows, ceil_div(rows, max(step, most // step * step))), step) * step
    return ceil_div(rows, each), each


def partition(
    channels: int, images: int, cut: tuple[int, int], buffer_bytes: int, slots: int, most: int = 0
) -> Partition:
    """Strips of a channel for the number of blocks that ends first: by waves of blocks times strips of a block.

    ``cut`` is what ``cut_rows`` gives, ``slots`` the blocks that run at a time, ``most`` (0: any) a block's strips.
    """
    units = images * cut[0]
    fewest = ceil_div(units, most or units)
    parts = min(
        range(fewest, max(fewest, min(units, _MOST_WAVES * slots // channels)) + 1),
        key=lambda parts: ceil_div(channels * parts, slots) * (ceil_div(units, parts) + _START_UNITS),
    )
    return Partition(channels, units, parts, *cut, buffer_bytes)


def slots(facts: DeviceFacts, smem_bytes: int, min_blocks: int) -> int:
    """Blocks of a device that run at a time; 0 if one needs more shared memory than there is."""
    fit = (facts.max_smem_bytes + _RESERVED_BYTES) // (smem_bytes + _RESERVED_BYTES)
    return facts.sm_count * min(min_blocks, fit)


def bind(source: KernelSource, request: Request, cut: Cut, threads: int, own: Mapping[str, int]) -> BoundCall:
    """``finish.call`` of a kernel of ``threads`` a block, with fields of its ``own``."""
    n, channels, _, _ = request.result_shape
    divided = partition(channels, n, cut.strips, cut.side.buffer_bytes, cut.slots)
    fields: dict[str, Value] = {
        **named("w", "k.rs", request.second.strides),
        **named("out", "nch.", request.result_strides),
        "staged": cut.side._asdict(),
        "partition": divided._asdict(),
        **own,
    }
    shape = LaunchShape(channels * divided.parts, threads, cut.smem_bytes)
    launch = Launch(source, request.device, shape, fields)
    return finish.call(launch, request)
