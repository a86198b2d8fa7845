"""Host half of families/depthwise_window/wgrad.cu: the filter gradient of depthwise layers with filters of any size.

The roles of fprop are exchanged: the filter is the result, dy stands for the taps, and images are summed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from haloconv.env import device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, few_apart, summed_call
from haloconv.families.depthwise_window.axes import Axis, met_share, output_axis
from haloconv.families.depthwise_window.cut import (
    CONFIGS,
    EDGE_INSTRUCTIONS,
    MULTIPLY_SHARE,
    ROW_INSTRUCTIONS,
    RUN_PRODUCTS,
    TILE_J,
    WORD_BYTES,
    Config,
    Cut,
    Layout,
    Work,
    axis_fields,
    edges,
    layout,
    round_up,
    window_fields,
)
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_PARAMS_FORMAT = "3Q8q47i"
_MOST_PARTS = 256
_WAVES = 3
_PART_CYCLES = 150  # of sum_partials
_BLOCK_CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)


@dataclass(frozen=True)
class Split:
    """How terms (ranges of dy of an image) are shared: threads of a block by rows, blocks by parts."""

    shares: int
    share_rows: int
    part_terms: int


Plan = tuple[Config, Cut, Split]


def axes(problem: Problem) -> tuple[Axis, Axis]:
    """Both axes: results are filter rows and columns, taps are output pixels; stride and dilation change places."""
    (stride_h, stride_w), (dil_h, dil_w) = problem.stride, problem.dilation
    return (
        output_axis(problem.p, problem.h, problem.r, problem.padding[0], dil_h, stride_h),
        output_axis(problem.q, problem.w, problem.s, problem.padding[2], dil_w, stride_w),
    )


def terms(problem: Problem, cut: Cut) -> int:
    """Ranges of dy of all images."""
    return problem.n * ceil_div(problem.p, cut.chunk_r) * ceil_div(problem.q, cut.chunk_s)


def smem_bytes(cut: Cut, split: Split, places: Layout) -> int:
    """Shared memory of a block: windows of x and ranges of dy, later the sums of all shares."""
    staged = cut.planes * (places.plane_words + places.filter_words)
    return WORD_BYTES * max(staged, cut.planes * split.shares * cut.tile_p * cut.tile_q)


def threads_used(config: Config, cut: Cut, split: Split) -> int:
    """Threads that have a tile."""
    return cut.planes * split.shares * (cut.tile_p // config.tile_i) * (cut.tile_q // TILE_J)


def invalid(plan: Plan, both: tuple[Axis, Axis], channels_inner: bool, max_smem: int) -> str | None:
    """Why a block cannot be cut like this, or None."""
    config, cut, split = plan
    if cut.tile_p % config.tile_i or cut.tile_q % TILE_J:
        return f"tiles of {cut.tile_p} x {cut.tile_q} are no multiple of a thread's {config.tile_i} x {TILE_J}"
    if split.shares * split.share_rows < ceil_div(cut.chunk_r, both[0].steps):
        return f"{split.shares} shares of {split.share_rows} rows leave some of {cut.chunk_r} out"
    if threads_used(*plan) > config.threads:
        return f"{threads_used(*plan)} thread tiles do not fit a block of {config.threads} threads"
    if channels_inner and cut.planes & (cut.planes - 1):
        return f"{cut.planes} channels are no power of two, as lanes need it"
    needed = smem_bytes(cut, split, layout(config, cut, both))
    if needed > max_smem:
        return f"needs {needed} bytes of shared memory per block; the device has {max_smem}"
    return None


def _blocks_of_a_part(problem: Problem, cut: Cut, both: tuple[Axis, Axis]) -> int:
    tiles = ceil_div(both[0].class_results, cut.tile_p) * ceil_div(both[1].class_results, cut.tile_q)
    return tiles * both[0].classes * both[1].classes * ceil_div(problem.k, cut.planes)


def _cost(problem: Problem, plan: Plan, both: tuple[Axis, Axis], inner: bool, limits: tuple[int, int]) -> float:
    """Estimated cycles of a launch. ``limits`` are multiprocessors and bytes of shared memory of one."""
    config, cut, split = plan
    places = layout(config, cut, both)
    steps_h, steps_w = both[0].steps, both[1].steps
    rows = min(split.share_rows, ceil_div(cut.chunk_r, steps_h)) * steps_h
    own = config.tile_i * TILE_J * rows * cut.chunk_s / MULTIPLY_SHARE
    row_instructions = (rows + (config.tile_i - 1) * steps_h) * ROW_INSTRUCTIONS
    own += (row_instructions + steps_h * edges(config) * EDGE_INSTRUCTIONS) * steps_w
    own *= met_share(both[0], config.tile_i)
    parts = ceil_div(terms(problem, cut), split.part_terms)
    work = Work(
        blocks=parts * _blocks_of_a_part(problem, cut, both),
        smem_bytes=smem_bytes(cut, split, places),
        warps=ceil_div(threads_used(*plan), 32),
        instructions=split.part_terms * own,
        terms=split.part_terms,
        staged=cut.planes * (places.lines_h * places.lines_w * steps_h * steps_w + places.filter_words),
        channel_run=cut.planes if inner else 0,
    )
    return work.cycles(config, limits) + parts * _PART_CYCLES


def _plans(
    problem: Problem, both: tuple[Axis, Axis], inner: bool, limits: tuple[int, int], most_results: int
) -> Iterator[Plan]:
    """Every plan worth a thought that runs, with tiles of up to ``most_results`` squared."""
    for config in CONFIGS:
        tile_q = min(round_up(both[1].class_results, TILE_J), most_results)
        tile_p = min(round_up(both[0].class_results, config.tile_i), most_results, config.threads * TILE_J // tile_q)
        tile_p -= tile_p % config.tile_i
        for (chunk_r, chunk_s), shares in product(_chunks(both), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)):
            share_rows = ceil_div(ceil_div(chunk_r, both[0].steps), shares)
            if shares > 1 and (shares - 1) * share_rows * both[0].steps >= chunk_r:
                continue
            most = config.threads // (shares * (tile_p // config.tile_i) * (tile_q // TILE_J))
            for channels in (1, 2, 4, 8, 16, 32) if inner else _BLOCK_CHANNELS:
                if channels > most or (channels >= 2 * problem.k and channels > 1):
                    continue
                cut = Cut(tile_p, tile_q, channels, channels, chunk_r, chunk_s)
                plan = (config, cut, _split(problem, cut, both, shares, share_rows, limits))
                if invalid(plan, both, inner, limits[1]) is None:
                    yield plan


def _chunks(both: tuple[Axis, Axis]) -> Iterator[tuple[int, int]]:
    """Rows and columns of dy that are staged at a time: whole rows, unless one row is too long."""
    chunk_s = min(both[1].taps, 512)
    for parts in (1, 2, 3, 4, 7, 8, 14, 16, 32, 64, 128, 1 << 20):
        yield ceil_div(min(both[0].taps, 512), parts), chunk_s
    yield 1, min(chunk_s, 64)


def _split(
    problem: Problem, cut: Cut, both: tuple[Axis, Axis], shares: int, share_rows: int, limits: tuple[int, int]
) -> Split:
    """As many parts as fill the device, and as rounding asks for."""
    count = terms(problem, cut)
    wanted = ceil_div(_WAVES * 2 * limits[0], _blocks_of_a_part(problem, cut, both))
    products = min(cut.chunk_r, share_rows * both[0].steps) * cut.chunk_s
    rounding = ceil_div(count * products, RUN_PRODUCTS)
    parts = min(count, max(rounding, min(wanted, _MOST_PARTS)))
    return Split(shares, share_rows, ceil_div(count, parts))


def channels_inner(x: TensorForm) -> bool:
    """Whether channels of x, not columns, are neighbours in memory."""
    return x.strides[1] == 1 and x.strides[3] != 1


def good_plans(problem: Problem, inner: bool, limits: tuple[int, int]) -> list[Plan]:
    """The best plan with each config that has one, best first. ``limits`` as in ``choose``; empty if nothing fits."""
    both = axes(problem)
    for most_results in (64, 32, 16, 8):  # a filter that is cut is staged in parts: only if it does not fit
        plans = _plans(problem, both, inner, limits, most_results)
        costs = [(_cost(problem, plan, both, inner, limits), plan) for plan in plans]
        if costs:
            return few_apart((plan for _, plan in sorted(costs, key=lambda each: each[0])), lambda plan: plan[0])
    return []


def choose(problem: Problem, inner: bool, limits: tuple[int, int]) -> Plan:
    """What is compiled and how the launch is cut. ``limits`` are multiprocessors and bytes of shared memory.

    Raises RuntimeError if nothing fits.
    """
    best = next(iter(good_plans(problem, inner, limits)), None)
    if best is not None:
        return best
    raise RuntimeError(f"no cut of depthwise_window fits {limits[1]} bytes of shared memory for {problem}")


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text. No extent of image, filter, stride or dilation takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "TILE_I": config.tile_i,
        "THREADS": config.threads,
        "MIN_BLOCKS": config.min_blocks,
    }
    return kernel_source("depthwise_window/wgrad", "depthwise_window_wgrad", constants)


def _fields(problem: Problem, plan: Plan, strides: tuple[int, ...], inner: bool) -> tuple[int, ...]:
    """The fields of ``Params`` in depthwise_window_wgrad.cu behind its pointers."""
    config, cut, split = plan
    both = axes(problem)
    places = layout(config, cut, both)
    return (
        *strides,
        *(problem.k, problem.k_per_group, ceil_div(problem.k, cut.planes)),
        *(ceil_div(problem.p, cut.chunk_r), ceil_div(problem.q, cut.chunk_s)),
        *(terms(problem, cut), split.part_terms, split.shares, split.share_rows),
        *axis_fields(both[0], cut.tile_p, cut.chunk_r, places.lines_h),
        *axis_fields(both[1], cut.tile_q, cut.chunk_s, places.lines_w),
        *window_fields(config, cut, places, both, inner),
    )


def bind_wgrad(
    problem: Problem,
    dy: TensorForm,
    x: TensorForm,
    result_layout: str,
    device: torch.device,
    wanted: Plan | None = None,
) -> BoundCall:
    """``wgrad(dy, x) -> dw`` (K, 1, R, S), stored as ``result_layout``; without ``wanted`` as the model prefers."""
    facts = device_facts(device.index)
    inner = channels_inner(x)
    plan = config, cut, split = wanted or choose(problem, inner, (facts.sm_count, facts.max_smem_bytes))
    both = axes(problem)
    smem = smem_bytes(cut, split, layout(config, cut, both))
    parts = ceil_div(terms(problem, cut), split.part_terms)
    grid = parts * _blocks_of_a_part(problem, cut, both)
    fields = _fields(problem, plan, (*x.strides, *dy.strides), inner)
    launch = PositionalLaunch(source(problem, config), device, grid, config.threads, smem, _PARAMS_FORMAT, fields)
    shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
    sum_parts = bind_sum(problem.dtype, shape, dw_strides, parts, device)
    partial_elems = parts * problem.k * problem.r * problem.s
    return summed_call(launch, sum_parts, partial_elems, shape, dw_strides)


def shipped_sources() -> list[KernelSource]:
    """Every config in fp32."""
    like = Problem("wgrad", 1, 8, 8, 8, 8, 3, 3, groups=8)
    return [source(like, config) for config in CONFIGS]
