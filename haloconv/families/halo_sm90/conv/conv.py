"""Host half of families/halo_sm90/conv/conv.cu: fprop and dgrad of dense and grouped layers on Hopper's tensor cores.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. NCHW and channels_last, in and out,
are native. Filters are packed by a small kernel before every launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from haloconv import support
from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import as_the_result, why_not_direction
from haloconv.families.halo_sm90.conv import copy_of_dy
from haloconv.families.halo_sm90.conv.configs import best_tilings, copied_tilings, split_tilings, storage_of, tilings
from haloconv.families.halo_sm90.conv.form import form_of
from haloconv.families.halo_sm90.conv.launches import (
    conv_launch,
    conv_source,
    fixup_launch,
    fixup_source,
    pack_launch,
    pack_source,
    split_sums,
)
from haloconv.families.halo_sm90.conv.operands import operands_of
from haloconv.families.halo_sm90.conv.shape import Storage
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.families.halo_sm90.terms import TERMS
from haloconv.families.reduce.partials import applies, bind_sum
from haloconv.families.reduce.partials import source as sum_source
from haloconv.jit import KernelSource
from haloconv.jit.launch import Launch
from haloconv.problem import Direction, Request

KERNEL = "halo_sm90/conv"
DIRECTIONS: tuple[Direction, ...] = ("fprop", "dgrad")
_ARCH = "sm_90a"
_FLAG_BYTES = 128  # before the packed weights, which keep their alignment


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, whatever its tensors' forms, else a sentence that says why not."""
    problem, facts = request.problem, request.facts
    reason = why_not_direction(problem, *DIRECTIONS) or support.why_no_tensor_cores(problem, ("tf32", *TERMS))
    if reason is not None:
        return reason
    if facts.arch != _ARCH:
        return "the device is no Hopper GPU (compute capability 9.0)"
    inner = problem.layout == "nhwc"
    storage = Storage(problem.dtype.itemsize, inner, False, inner, False, terms=TERMS.get(problem.precision, 1))
    if not best_tilings(form_of(problem), storage, facts.sm_count):
        return "no tile of halo_sm90 fits shared memory"
    return None


def configs(request: Request) -> list[Config]:
    """The best tilings by the cost model. What one leaves to another launch comes with it."""
    storage, problem, sm_count = storage_of(request), request.problem, request.facts.sm_count
    found = best_tilings(form_of(problem), storage, sm_count, applies(problem.epilogue))[:MOST_CONFIGS]
    return [Config(KERNEL, config_key(tiling.shape), tiling) for tiling in found]


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, or with a residual fprop(x, w, b, residual) -> y, or dgrad(dy, w) -> dx."""
    return _Bound(request, config.derived).run


class _Launches(NamedTuple):
    """The launches of one tiling. Its flag and its packed weights begin at byte ``offset`` of the workspace."""

    pack: Launch
    conv: Launch
    fixup: Launch | None
    add: Launch | None
    offset: int


class _Bound:
    """A request bound to its launches.

    Copy dy, if it is read from a copy; pack the filter, convolve, fix up or sum, and the same of columns left over.
    """

    def __init__(self, request: Request, tiling: Tiling) -> None:
        self._shape, self._strides = request.result_shape, request.result_strides
        self._has_gaps, self._has_halo = tiling.form.has_gaps, tiling.storage.has_halo
        self._copy = copy_of_dy.bind(request) if tiling.shape.copied else None
        self._launches: list[_Launches] = []
        self._packed_bytes, self._partial_bytes = 0, 4 * tiling.form.splits * prod(self._shape)
        for one in tiling.launches:
            self._launches.append(_launches(request, one, self._packed_bytes))
            self._packed_bytes += _FLAG_BYTES + one.packed_bytes

    def run(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *more: torch.Tensor) -> torch.Tensor:
        """y of x, w, b or None, and a residual as y or a halo if there is one; or dx of dy and w, and a (C,) to add."""
        y = x.new_empty_strided(self._shape, self._strides)
        b = b if b is None or b.is_contiguous() else b.contiguous()
        if self._has_gaps:
            y.zero_() if b is None else y.copy_(b.view(-1, 1, 1))  # pixels that no tap reaches
        source = x if self._copy is None else self._copy(x)
        packed = torch.empty(self._packed_bytes, dtype=torch.uint8, device=x.device)
        bias = 0 if b is None else b.data_ptr()
        halo: tuple[int, ...] = ()
        residual: tuple[int, ...] = ()
        if more and self._has_halo:
            halo = (more[0].data_ptr(),)
        elif more:
            ordered = as_the_result(more[0], self._strides)
            residual = (ordered.data_ptr(),)
        for pack, conv, fixup, add, offset in self._launches:
            flag = packed.data_ptr() + offset
            place = flag + _FLAG_BYTES
            pack(w.data_ptr(), place, flag)
            if add is not None:
                partial = torch.empty(self._partial_bytes, dtype=torch.uint8, device=x.device)
                conv(source.data_ptr(), place, partial.data_ptr(), 0, flag, *halo)
                add(y.data_ptr(), partial.data_ptr(), bias, *residual)
                continue
            conv(source.data_ptr(), place, y.data_ptr(), bias, flag, *halo, *residual)
            if fixup is not None:
                fixup(x.data_ptr(), w.data_ptr(), y.data_ptr(), bias, flag, *residual)
        return y


def _launches(request: Request, tiling: Tiling, offset: int) -> _Launches:
    operands, splits = operands_of(request), tiling.form.splits > 1
    own = operands.split_k(tiling, request.result_layout) if splits else operands
    if tiling.shape.copied:
        own = replace(own, x=copy_of_dy.strides(request.problem))
    return _Launches(
        pack_launch(request, tiling, own),
        conv_launch(request, tiling, own),
        fixup_launch(request, tiling, operands) if tiling.needs_fixup else None,
        bind_sum(split_sums(request.problem, tiling), request.device) if splits else None,
        offset,
    )


def sources(request: Request) -> Iterator[KernelSource]:
    """The sources of every tile shape that the request's launches choose from, and of their packing."""
    problem, storage, form = request.problem, storage_of(request), form_of(request.problem)
    copied = copied_tilings(form, storage)
    if copied:
        yield copy_of_dy.source(problem)
    for tiling in (launch for each in (*tilings(form, storage), *copied) for launch in each.launches):
        yield pack_source(problem, tiling)
        yield conv_source(problem, tiling)
        if tiling.needs_fixup:
            yield fixup_source(problem, tiling.form, storage)


def split_sources(request: Request) -> Iterator[KernelSource]:
    """The sources of every tile shape in split-K of two, of their packing, and of the sum of the partial sums."""
    problem = request.problem
    for tiling in split_tilings(form_of(problem), storage_of(request)):
        if tiling.shape.splits == 2:
            yield pack_source(problem, tiling)
            yield conv_source(problem, tiling)
            yield sum_source(split_sums(problem, tiling))
