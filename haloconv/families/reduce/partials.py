"""Host half of families/reduce/partials.cu: the sum over partial results, whose output has any strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, divisor
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Epilogue, Problem, Request

KERNEL = "reduce/partials"
_THREADS = 256  # of a block
_AXES, _MOST_AXES = 4, 7  # of most kernels; of the struct
_AT_ONCE = 8  # loads of a thread that are in flight at once
_NO_LIMIT = 1 << 31
_INT32_ELEMS = 1 << 31  # of which the kernel numbers fewer by 32 bits


class Axis(NamedTuple):
    """Elements that are ``stride`` elements apart in the output; a step adds ``counts`` to an element's count."""

    extent: int
    stride: int
    counts: int = 0


@dataclass(frozen=True)
class Partials:
    """Partial sums: ``parts`` tensors of the same ``axes``, the last of which runs fastest, and the output's dtype.

    Part follows part, ``part_elems`` elements apart (0: no gap). With ``run_elems`` the parts of a run of so many
    elements follow each other instead, before those of the next run. Elements whose count reaches ``limit`` are
    padding. ``bias``: bias[count] is added, and with ``residual`` a tensor as the output. ``relu``: outputs are at
    least 0. Sums are fp32, of fp64 outputs fp64.
    """

    dtype: torch.dtype
    axes: tuple[Axis, ...]
    parts: int
    part_elems: int = 0
    run_elems: int = 0
    limit: int = _NO_LIMIT
    bias: bool = False
    relu: bool = False
    residual: bool = False

    @property
    def elems(self) -> int:
        """Elements of a part, without what lies between it and the next one."""
        return prod(axis.extent for axis in self.axes)

    @property
    def total_elems(self) -> int:
        """Elements of the tensor that holds all parts."""
        return self.parts * (self.part_elems or self.elems)

    @property
    def acc_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def applies(epilogue: Epilogue) -> bool:
    """Whether this sum can be followed by the epilogue: it has no scale, and no activation but ReLU."""
    return not epilogue.scale and epilogue.activation in (None, "relu")


def followed(partials: Partials, problem: Problem) -> Partials:
    """The partial sums with the bias, residual and ReLU of a problem, to whose epilogue the sum ``applies``."""
    relu, residual = problem.epilogue.activation == "relu", problem.epilogue.residual
    return replace(partials, bias=problem.bias, relu=relu, residual=residual)


def of_filter(request: Request, parts: int) -> Partials:
    """The partial sums [part][K][C / G][R][S] of a filter gradient."""
    axes = (Axis(*each) for each in zip(request.result_shape, request.result_strides, strict=True))
    return Partials(request.problem.dtype, tuple(axes), parts)


def source(partials: Partials) -> KernelSource:
    """The specialised source. Extents and strides are run-time values."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[partials.dtype],
        "THREADS": _THREADS,
        "AXES": _AXES if len(partials.axes) <= _AXES else _MOST_AXES,
        "INT64_INDEX": int(partials.elems >= _INT32_ELEMS),
        "HAS_BIAS": int(partials.bias),
        "HAS_RELU": int(partials.relu),
        **({"HAS_RESIDUAL": 1} if partials.residual else {}),
    }
    return kernel_source(KERNEL, "sum_partials", constants)


def part_lanes(partials: Partials) -> int:
    """Threads of an element: several where one would wait for memory often, and elements are too few to hide it.

    Drawn from 46 sums of filter gradients, bias gradients and split-K on an NVIDIA H200 (2026-11-23).
    """
    parts, elems = partials.parts, partials.elems
    if parts >= 256 and elems <= 1024:
        return 32
    few = elems <= 16384 or (parts >= 64 and elems <= 65536)
    return 8 if parts > _AT_ONCE and few else 1


def bind_sum(partials: Partials, device: torch.device) -> Launch:
    """``run(out_pointer, partials_pointer, bias_pointer)``: the sum over the parts, in an order fixed by the shapes.

    Without ``bias`` its pointer is not read. With ``residual`` there is a fourth, that of the residual.
    """
    lanes = part_lanes(partials)
    elems, run = partials.elems, partials.run_elems
    room = _AXES if len(partials.axes) <= _AXES else _MOST_AXES
    axes = (*(Axis(1, 0) for _ in range(room - len(partials.axes))), *partials.axes)
    axes += (Axis(1, 0),) * (_MOST_AXES - room)  # behind those that count
    fields: dict[str, Value] = {
        "elems": elems,
        "part_stride": run or partials.part_elems or elems,
        "run_gap": (partials.parts - 1) * run,
        "run": divisor(run or 1),
        "parts": partials.parts,
        "part_lanes": lanes,
        "block_elems": _THREADS // lanes,
        "limit": min(partials.limit, _NO_LIMIT - 1),
        "axes": [{"extent": divisor(each.extent), "count": each.counts, "stride": each.stride} for each in axes],
    }
    shape = LaunchShape(ceil_div(elems, _THREADS // lanes), _THREADS)
    return Launch(source(partials), device, shape, fields)


def wgrad_call(
    launch: Launch, request: Request, partials: Partials, sum_parts: Callable[[int, int, int], None] | None = None
) -> BoundCall:
    """wgrad(dy, x) -> dw of a kernel that takes (x, dy, partial sums); ``sum_parts`` is what adds them up otherwise."""
    sum_parts = sum_parts or bind_sum(partials, request.device)
    elems, acc_dtype = partials.total_elems, partials.acc_dtype
    shape, strides = request.result_shape, request.result_strides

    def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sums = x.new_empty(elems, dtype=acc_dtype)
        launch(x.data_ptr(), dy.data_ptr(), sums.data_ptr())
        dw = x.new_empty_strided(shape, strides)
        sum_parts(dw.data_ptr(), sums.data_ptr(), 0)
        return dw

    return wgrad


def sources() -> list[KernelSource]:
    """Every dtype; with a bias and ReLU, with a residual, and with many axes, where needed."""
    few, many = (Axis(64, 1),) * _AXES, (Axis(2, 1),) * _MOST_AXES
    found = [Partials(dtype, few, 1) for dtype in ELEMENTS]
    others = [dtype for dtype in ELEMENTS if dtype != torch.float64]
    found += [Partials(dtype, few, 1, bias=True, relu=True) for dtype in others]
    found += [Partials(dtype, few, 1, bias=True, relu=True, residual=True) for dtype in others]
    found += [Partials(dtype, many, 1) for dtype in ELEMENTS if dtype.itemsize == 2]
    return [source(each) for each in found]
