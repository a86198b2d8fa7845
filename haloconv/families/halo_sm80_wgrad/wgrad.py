"""Host half of ``halo_sm80_wgrad`` (device half: families/halo_sm80_wgrad/wgrad.cu): weight gradients of few channels.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. Any stride, dilation, four-sided
padding, groups and storage, in NCHW and channels_last. From compute capability 8.0 on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from haloconv import support
from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import MOST_CANDIDATES, BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, few_apart
from haloconv.families.grouped_sm90 import wgrad as march
from haloconv.families.halo_sm80.fold import fold, folded, has_folds
from haloconv.families.halo_sm80_wgrad.configs import Config, channels_inner, configs, pitches, smem_bytes
from haloconv.families.halo_sm80_wgrad.layer import Layer, layer_of
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_PARAMS_FORMAT = "3Q9q15i"
_MOST_WAVES = 4
_BUSY = 0.95  # of the blocks that run at a time: what the last wave may leave
_PARTS_AT_ONCE = 40  # more are summed in runs
_SHIPPED_SMEM_BYTES = 99 << 10  # of the architectures that have least
_MARCH_SMEM_BYTES = 227 << 10  # of the devices that march
_INT_LIMIT = 1 << 31


class HaloSm80WgradFamily:
    """The weight gradient, written for layers of few channels per group; right for every layer whose tiles fit."""

    name = "halo_sm80_wgrad"

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        if problem.direction != "wgrad":
            return "halo_sm80_wgrad computes weight gradients only"
        reason = support.why_no_tensor_core_products(problem)
        if reason is not None:
            return reason
        if int(device_facts(device.index).arch.removeprefix("sm_").rstrip("a")) < 80:
            return "the device is older than compute capability 8.0"
        smem_bytes = device_facts(device.index).max_smem_bytes
        for aligned in (True, False):
            shapes = (problem.y_shape, problem.x_shape)
            dy, x = (TensorForm(strides_of(shape, problem.layout), aligned) for shape in shapes)
            if not configs(problem, fitting_layer(problem, dy, x, smem_bytes), smem_bytes):
                return "no tile of halo_sm80_wgrad fits shared memory and registers"
        return None

    def candidates(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[Config | march.Config]:
        """The march, then the best of each way to share a block out among warps."""
        facts = device_facts(device.index)
        marches = _marches(problem, first, second, facts)
        problem, second = _folded(problem, first, second, result_layout, facts)
        layer = fitting_layer(problem, first, second, facts.max_smem_bytes)
        found = few_apart(
            configs(problem, layer, facts.max_smem_bytes),
            lambda each: (each.warps_m, each.warps_n, each.warps_e, each.tile_g),
        )
        return [*marches, *found][:MOST_CANDIDATES]

    def bind(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        config: Config | march.Config | None = None,
    ) -> BoundCall:
        facts = device_facts(device.index)
        if config is None:
            config = next(iter(_marches(problem, first, second, facts)), None)
        if isinstance(config, march.Config):
            return march.bind(problem, first, second, result_layout, device, config)
        dw_shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
        problem, second = _folded(problem, first, second, result_layout, facts)
        layer = fitting_layer(problem, first, second, facts.max_smem_bytes)
        config = config or best_config(problem, layer, facts.max_smem_bytes)
        cut = Cut(problem, layer, config, facts.sm_count)
        launch = PositionalLaunch(
            source(problem, layer, config, first, second), device, cut.grid, 32 * config.warps,
            smem_bytes(config, layer), _PARAMS_FORMAT, cut.fields(first, second),
        )  # fmt: skip
        k, c, r, s = problem.w_shape
        sum_runs = None
        if cut.run_parts > 1:  # of the parts at runs * i + j the sum goes to place j
            runs_shape = (cut.runs * k, c, r, s)
            sum_runs = bind_sum(torch.float32, runs_shape, strides_of(runs_shape, "nchw"), cut.run_parts, device)
        sum_parts = bind_sum(
            problem.dtype, problem.w_shape, strides_of(problem.w_shape, result_layout), cut.runs, device
        )
        part_elems = k * c * r * s

        def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            partials = x.new_empty(cut.parts * part_elems, dtype=torch.float32)
            launch(x.data_ptr(), dy.data_ptr(), partials.data_ptr())
            if sum_runs is not None:
                sums = x.new_empty(cut.runs * part_elems, dtype=torch.float32)
                sum_runs(sums.data_ptr(), partials.data_ptr())
                partials = sums
            dw = x.new_empty_strided(dw_shape, dw_strides)
            sum_parts(dw.data_ptr(), partials.data_ptr())
            return dw

        return wgrad


def _marches(problem: Problem, dy: TensorForm, x: TensorForm, facts: DeviceFacts) -> list[march.Config]:
    """The config of families/grouped_sm90/wgrad.cu, if it takes the problem."""
    best = None if march.why_not(problem, dy, x, facts) else march.best_config(problem, facts.max_smem_bytes)
    return [] if best is None else [best]


def _folded(
    problem: Problem, dy: TensorForm, x: TensorForm, result_layout: str, facts: DeviceFacts
) -> tuple[Problem, TensorForm]:
    """A channels_last stem as one of a single channel, if that has tiles."""
    if result_layout != "nhwc" or not has_folds(problem, x):
        return problem, x
    one, form, smem_bytes = fold(problem), folded(x), facts.max_smem_bytes
    return (one, form) if configs(one, fitting_layer(one, dy, form, smem_bytes), smem_bytes) else (problem, x)


def fitting_layer(problem: Problem, dy: TensorForm, x: TensorForm, max_smem_bytes: int) -> Layer:
    """The layer as raw copies, which need two buffers, or as words made of loads where no two buffers fit."""
    layer = layer_of(problem, dy, x)
    return layer if configs(problem, layer, max_smem_bytes) else layer_of(problem, dy, x, copied=False)


def best_config(problem: Problem, layer: Layer, max_smem_bytes: int) -> Config:
    """The config that the cost model prefers. To time another one, replace this function."""
    return configs(problem, layer, max_smem_bytes)[0]


class Cut:
    """How a problem's sum is cut: stages of an image across and down, and parts of all stages, one for each block.

    Many parts are ``runs`` of ``run_parts``, which are summed first: one after the other would take long.
    """

    def __init__(self, problem: Problem, layer: Layer, config: Config, sm_count: int) -> None:
        self.problem, self.layer = problem, layer
        self.image_step = layer.halves if problem.n > 1 else 1
        self.band_step = layer.halves // self.image_step
        self.strips = ceil_div(problem.q, config.tile_q)
        self.bands = ceil_div(ceil_div(problem.p, config.tile_p), self.band_step)
        self.stages = ceil_div(problem.n, self.image_step) * self.strips * self.bands
        self.group_blocks = ceil_div(problem.groups, config.tile_g)
        c_blocks, k_blocks = ceil_div(layer.c, config.tile_c), ceil_div(layer.k, config.tile_k)
        blocks = self.group_blocks * c_blocks * k_blocks
        self.runs, self.run_parts = _runs(blocks, self.stages, sm_count * config.min_blocks)
        self.parts = self.runs * self.run_parts
        self.grid = blocks * self.parts

    def fields(self, dy: TensorForm, x: TensorForm) -> tuple[int, ...]:
        """The scalars of ``Params`` (halo_sm80_wgrad/work.cuh), in its order."""
        one, reading = self.problem, self.layer.x
        lead = 0 if reading.inner else -one.padding[2] % reading.vec
        return (
            *(*x.strides, *dy.strides, self.stages, one.n, one.h, one.w, one.p, one.q),
            *(one.padding[0], one.padding[2], lead, one.groups, self.group_blocks, self.parts),
            *(self.strips, self.bands, self.image_step, self.band_step),
        )


def _runs(blocks: int, stages: int, resident: int) -> tuple[int, int]:
    """Runs and parts of a run that keep the device busy: ``blocks`` of each part, ``resident`` at a time.

    Of those that do, the fewest; else those that keep it busiest.
    """
    most = max(1, min(stages, _MOST_WAVES * resident // blocks))

    def busy(parts: int) -> float:
        return blocks * parts / (ceil_div(blocks * parts, resident) * resident)

    best = (1, 1)
    for parts in range(1, most + 1):
        run_parts = 1 if parts <= _PARTS_AT_ONCE else math.isqrt(parts)
        runs = parts // run_parts
        if busy(runs * run_parts) > busy(best[0] * best[1]):
            best = (runs, run_parts)
        if busy(runs * run_parts) >= _BUSY:
            break
    return best


def source(problem: Problem, layer: Layer, config: Config, dy: TensorForm, x: TensorForm) -> KernelSource:
    """The specialised text. The image takes part through the columns of a tile alone."""
    at = pitches(config, layer)
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "C_PER_GROUP": layer.c,
        "K_PER_GROUP": layer.k,
        "R": layer.r,
        "S": layer.s,
        "STRIDE_H": layer.stride[0],
        "STRIDE_W": layer.stride[1],
        "DIL_H": layer.dilation[0],
        "DIL_W": layer.dilation[1],
        "TILE_P": config.tile_p,
        "TILE_Q": config.tile_q,
        "TILE_C": config.tile_c,
        "TILE_K": config.tile_k,
        "TILE_G": config.tile_g,
        "WARPS_M": config.warps_m,
        "WARPS_N": config.warps_n,
        "WARPS_E": config.warps_e,
        "MIN_BLOCKS": config.min_blocks,
        "NEIGHBOURS": int(layer.neighbours),
        "FIRST_HALF": layer.first_half,
        "PIECES": int(layer.pieces),
        "CHANNELS_INNER": int(channels_inner(config)),
        "X_INNER": int(layer.x.inner),
        "X_VEC": layer.x.vec,
        "Y_INNER": int(layer.y.inner),
        "Y_VEC": layer.y.vec,
        "PLANE_PITCH": at.plane,
        "LINE_PITCH": at.line,
        "X_PITCH": at.x,
        "Y_PITCH": at.y,
        "OFFSET": "int" if _spans_int(config, layer, dy, x) else "hc::i64",
        "SMEM_BYTES": smem_bytes(config, layer),
    }
    return kernel_source("halo_sm80_wgrad/wgrad", "halo_sm80_wgrad", constants)


def _spans_int(config: Config, layer: Layer, dy: TensorForm, x: TensorForm) -> bool:
    """Whether 32 bits hold every distance inside a tile of x and of dy, in elements."""
    at = pitches(config, layer)
    x_span = config.tile_g * config.tile_c * x.strides[1] + at.x * max(x.strides[2:])
    y_span = config.tile_g * config.tile_k * dy.strides[1] + at.y * max(dy.strides[2:])
    return max(x_span, y_span) < _INT_LIMIT


def shipped_sources() -> list[KernelSource]:
    """Representative layers in their best configs: every type, layout, width of loads and way to share a block."""
    sources = {}
    for problem, aligned in _representative():
        shapes = (problem.y_shape, problem.x_shape)
        dy, x = (TensorForm(strides_of(shape, problem.layout), aligned) for shape in shapes)
        layer = layer_of(problem, dy, x)
        text = source(problem, layer, best_config(problem, layer, _SHIPPED_SMEM_BYTES), dy, x)
        sources[text.digest] = text
    for problem in _marching():
        config = march.best_config(problem, _MARCH_SMEM_BYTES)
        assert config is not None
        for text in (march.source(problem, config), march.sum_source(problem, config)):
            sources[text.digest] = text
    return list(sources.values())


def _marching() -> Iterator[Problem]:
    """Layers of 8 and of 16 channels per group in channels_last."""
    for dtype, channels, extent in ((torch.float16, 8, 28), (torch.bfloat16, 16, 14)):
        yield Problem(
            "wgrad", n=32, c=8 * channels, h=extent, w=extent, k=8 * channels, r=3, s=3, padding=(1, 1, 1, 1),
            groups=8, dtype=dtype, layout="nhwc",
        )  # fmt: skip


def _representative() -> Iterator[tuple[Problem, bool]]:
    """A stem, layers of 8 and of 24 channels per group; and whether their tensors are aligned."""
    stem = {"c": 3, "h": 224, "w": 224, "k": 64, "r": 7, "s": 7, "stride": (2, 2), "padding": (3, 3, 3, 3)}
    thin = {"c": 256, "h": 28, "w": 28, "k": 256, "r": 3, "s": 3, "padding": (1, 1, 1, 1), "groups": 32}
    wide = {"c": 144, "h": 28, "w": 28, "k": 144, "r": 3, "s": 3, "padding": (1, 1, 1, 1), "groups": 6}
    for layer, dtype, layout, aligned in (
        (stem, torch.float32, "nchw", True),
        (stem, torch.float16, "nchw", True),
        (stem, torch.bfloat16, "nhwc", True),
        (thin, torch.float32, "nchw", True),
        (thin, torch.float16, "nchw", True),
        (thin, torch.float16, "nchw", False),
        (thin, torch.bfloat16, "nhwc", True),
        (thin, torch.float32, "nhwc", True),
        (wide, torch.float32, "nchw", True),
        (wide | {"stride": (2, 2)}, torch.float16, "nhwc", True),
    ):
        precision = "tf32" if dtype == torch.float32 else "ieee"
        yield Problem("wgrad", n=64, dtype=dtype, layout=layout, precision=precision, **layer), aligned
