"""Host half of the ``direct`` family (device half: families/direct/direct.cu): every legal problem on CUDA cores.

The family that is always right: fp32, fp16 and bf16 with fp32 sums, fp64 with fp64 sums; any stride, dilation,
four-sided padding, groups and storage. fp32 products are formed in full precision whatever precision was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from haloconv import support
from haloconv.env import device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.reduce import sums as direct_sums
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import DIRECTIONS, Problem, TensorForm

_DIRECTION_NUMBERS = {"fprop": 0, "dgrad": 1, "wgrad": 2}
_PROMOTE_ES = 512  # reduction indices between two promotions
_LONG_REDUCTION = 1024  # from here on a single run of fp32 sums would round too much
_GATHER_COST = 20  # staging a gathered element, in multiplies: from the rates of tiles of 32 and 64 rows on an H200
_WAVES = 2  # wgrad: blocks per resident block slot, so that the last wave is a small share
_MIN_PART_STAGES = 32  # wgrad: stages that a block must have for its start and end not to count
_PARAMS_FORMAT = "5Q13q10i"


@dataclass(frozen=True)
class Config:
    """The tile of one block: rows and columns of the result, reduction indices of a stage, sums of a thread.

    ``min_blocks`` is the number of blocks that must fit a multiprocessor, and so caps the registers of a thread.
    """

    tile_m: int
    tile_n: int
    tile_e: int
    thread_m: int
    thread_n: int
    min_blocks: int
    promote_stages: int = 0

    @property
    def threads(self) -> int:
        return (self.tile_m // self.thread_m) * (self.tile_n // self.thread_n)

    def smem_bytes(self, acc_bytes: int) -> int:
        """Size of ``Smem`` in direct.cu; the kernel asserts that it is enough."""
        stages = 2 * self.tile_e * (self.tile_m + 4 + self.tile_n + 4) * acc_bytes
        entries = 16 * (self.tile_m + self.tile_n + 4 * self.tile_e) + 8 * self.tile_n
        promoted = (self.thread_m * self.thread_n * self.threads if self.promote_stages else 1) * acc_bytes
        return (stages + entries + promoted + 15) // 16 * 16


def extents(problem: Problem) -> tuple[int, int]:
    """Rows of the product, and its columns (0 where they are pixels, whose number is known at run time only)."""
    if problem.direction == "dgrad":
        return problem.c_per_group, 0
    filter_elems = problem.c_per_group * problem.r * problem.s
    return problem.k_per_group, filter_elems if problem.direction == "wgrad" else 0


# Measured best first among tiles of one height that spill no register on any architecture. Narrow tiles gather much per
# multiply: few reduction indices per stage keep their loads in registers.
_TILES = (
    Config(128, 64, 8, 8, 8, min_blocks=3),
    Config(64, 128, 8, 8, 8, min_blocks=3),
    Config(64, 64, 8, 8, 8, min_blocks=4),
    Config(32, 256, 16, 8, 8, min_blocks=2),
    Config(32, 128, 8, 8, 8, min_blocks=4),
    Config(32, 64, 8, 8, 8, min_blocks=8),
    Config(16, 256, 8, 4, 8, min_blocks=3),
    Config(16, 128, 8, 4, 8, min_blocks=6),
    Config(16, 64, 8, 4, 8, min_blocks=12),
    Config(8, 256, 4, 4, 4, min_blocks=3),
    Config(8, 128, 4, 4, 4, min_blocks=6),
    Config(8, 64, 4, 4, 4, min_blocks=12),
    Config(4, 256, 4, 4, 4, min_blocks=6),
    Config(4, 128, 4, 4, 4, min_blocks=12),
)
# A double takes two registers: small thread tiles.
_TILES_FP64 = (
    Config(64, 64, 8, 4, 4, min_blocks=1),
    Config(32, 64, 8, 4, 4, min_blocks=2),
    Config(16, 64, 8, 4, 4, min_blocks=4),
    Config(8, 64, 4, 4, 4, min_blocks=8),
    Config(4, 128, 4, 4, 4, min_blocks=8),
)


def configs(problem: Problem) -> list[Config]:
    """Candidates, best first. They depend on filter, channels and dtype only: new image sizes never compile."""
    rows, cols = extents(problem)
    reduction = problem.r * problem.s * (problem.k_per_group if problem.direction == "dgrad" else problem.c_per_group)
    double = problem.dtype == torch.float64
    tiles = _TILES_FP64 if double else _TILES
    tile_m = min((tile.tile_m for tile in tiles), key=lambda each: ceil_div(rows, each) * (each + _GATHER_COST))
    candidates = [tile for tile in tiles if tile.tile_m == tile_m]
    fitting = [tile for tile in candidates if cols == 0 or tile.tile_n < 2 * cols] or candidates[-1:]
    if double or (problem.direction != "wgrad" and reduction < _LONG_REDUCTION):
        return fitting
    return [replace(tile, promote_stages=_PROMOTE_ES // tile.tile_e) for tile in fitting]


def invalid(config: Config, problem: Problem, max_smem_bytes: int) -> str | None:
    """Why a block of this tile cannot run on a device with ``max_smem_bytes`` per block, or None."""
    needed = config.smem_bytes(_acc_bytes(problem.dtype))
    if needed > max_smem_bytes:
        return f"needs {needed} bytes of shared memory per block; the device has {max_smem_bytes}"
    return None


def best_config(problem: Problem, max_smem_bytes: int) -> Config:
    """The first candidate that fits the device. Raises RuntimeError if none does."""
    for config in configs(problem):
        reason = invalid(config, problem, max_smem_bytes)
        if reason is None:
            return config
    raise RuntimeError(f"no tile of the direct family runs {problem} here: the smallest {reason}")


@dataclass(frozen=True)
class Staging:
    """How an operand is read: which lanes are neighbours, and how many elements one load takes (staging.cuh)."""

    e_lanes: bool
    vec: int


def _channel_vector(channels: int, form: TensorForm) -> int:
    """4 if runs of ``channels`` neighbours in memory are whole aligned groups of four, else 1."""
    neighbours = form.aligned and form.strides[1] == 1 and channels % 4 == 0
    return 4 if neighbours and all(form.strides[axis] % 4 == 0 for axis in (0, 2, 3)) else 1


def _stage_filter(problem: Problem, w: TensorForm, channels_inner: bool) -> Staging:
    """The filter as operand A of fprop (rows k) or dgrad (rows c)."""
    if problem.direction == "dgrad":
        rows_contiguous = w.strides[1] == 1 and problem.c_per_group > 1
        return Staging(not rows_contiguous, _channel_vector(problem.c_per_group, w) if rows_contiguous else 1)
    if channels_inner:
        return Staging(True, _channel_vector(problem.c_per_group, w))
    dense = strides_of(problem.w_shape, "nchw")
    filter_elems = problem.c_per_group * problem.r * problem.s
    whole = w.strides[1:] == dense[1:] and w.strides[0] % 4 == 0
    return Staging(True, 4 if whole and w.aligned and filter_elems % 4 == 0 else 1)


def _stage_activation(channels: int, form: TensorForm, channels_inner: bool, channels_are_es: bool) -> Staging:
    """x or y, whose neighbours in memory are channels (``channels_inner``) or pixels."""
    return Staging(channels_inner == channels_are_es, _channel_vector(channels, form) if channels_inner else 1)


def stagings(problem: Problem, first: TensorForm, second: TensorForm) -> tuple[bool, Staging, Staging]:
    """Whether the channel runs fastest in an index over (channel, tap), and how operands A and B are read."""
    if problem.direction == "wgrad":
        inner = _channel_is_unit(second)
        a = _stage_activation(problem.k_per_group, first, _channel_is_unit(first), False)
        return inner, a, _stage_activation(problem.c_per_group, second, inner, False)
    inner = _channel_is_unit(first)
    gathered_channels = problem.k_per_group if problem.direction == "dgrad" else problem.c_per_group
    return inner, _stage_filter(problem, second, inner), _stage_activation(gathered_channels, first, inner, True)


def _channel_is_unit(form: TensorForm) -> bool:
    """True if channels, not pixels, are neighbours in memory."""
    return form.strides[1] == 1 and form.strides[3] != 1


def source(problem: Problem, config: Config, first: TensorForm, second: TensorForm, result_layout: str) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    channels_inner, a, b = stagings(problem, first, second)
    constants: dict[str, int | str] = {
        "DIRECTION": _DIRECTION_NUMBERS[problem.direction],
        "ELEM": ELEMENTS[problem.dtype],
        "C_PER_GROUP": problem.c_per_group,
        "K_PER_GROUP": problem.k_per_group,
        "R": problem.r,
        "S": problem.s,
        "STRIDE_H": problem.stride[0],
        "STRIDE_W": problem.stride[1],
        "DIL_H": problem.dilation[0],
        "DIL_W": problem.dilation[1],
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "TILE_E": config.tile_e,
        "THREAD_M": config.thread_m,
        "THREAD_N": config.thread_n,
        "MIN_BLOCKS": config.min_blocks,
        "PROMOTE_STAGES": config.promote_stages,
        "SMEM_BYTES": config.smem_bytes(_acc_bytes(problem.dtype)),
        "CHANNELS_INNER": int(channels_inner),
        "A_E_LANES": int(a.e_lanes),
        "A_VEC": a.vec,
        "B_E_LANES": int(b.e_lanes),
        "B_VEC": b.vec,
        "ROWS_CONTIGUOUS": int(result_layout == "nhwc" and problem.direction != "wgrad"),
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("direct/direct", f"direct_{problem.direction}", constants)


class DirectFamily:
    """CUDA-core kernels for fprop, dgrad and wgrad of every legal problem."""

    name = "direct"

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        return support.why_not(problem, device)

    def bind(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> BoundCall:
        facts = device_facts(device.index)
        config = best_config(problem, facts.max_smem_bytes)
        text = source(problem, config, first, second, result_layout)
        make = {"fprop": _bind_fprop, "dgrad": _bind_dgrad, "wgrad": _bind_wgrad}[problem.direction]
        return make(problem, config, text, first, second, result_layout, device)


def _acc_bytes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4


def _params(problem: Problem, strides: tuple, pixels_per_part: int, tiles: tuple[int, int]) -> tuple[int, ...]:
    """The fields of ``Params`` behind its pointers."""
    extents_and_padding = (
        problem.n,
        problem.h,
        problem.w,
        problem.p,
        problem.q,
        problem.padding[0],
        problem.padding[2],
    )
    return (*strides, pixels_per_part, *extents_and_padding, *tiles, problem.groups)


def _tiles(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles along the rows and the columns of the product (of the largest residue class in dgrad)."""
    rows, cols = extents(problem)
    if problem.direction == "fprop":
        cols = problem.n * problem.p * problem.q
    elif problem.direction == "dgrad":
        cols = problem.n * ceil_div(problem.h, problem.stride[0]) * ceil_div(problem.w, problem.stride[1])
    return ceil_div(rows, config.tile_m), ceil_div(cols, config.tile_n)


def _bind_fprop(problem, config, text, x: TensorForm, w: TensorForm, result_layout, device) -> BoundCall:
    y_strides = strides_of(problem.y_shape, result_layout)
    tiles = _tiles(problem, config)
    fields = _params(problem, (*x.strides, *w.strides, *y_strides), 0, tiles)
    smem_bytes = config.smem_bytes(_acc_bytes(problem.dtype))
    grid = tiles[0] * tiles[1] * problem.groups
    launch = PositionalLaunch(text, device, grid, config.threads, smem_bytes, _PARAMS_FORMAT, fields)
    y_shape = problem.y_shape

    def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty_strided(y_shape, y_strides)
        if b is None:
            launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), 0, 0)
        else:
            b = b if b.is_contiguous() else b.contiguous()
            launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), b.data_ptr(), 0)
        return y

    return fprop


def _bind_dgrad(problem, config, text, dy: TensorForm, w: TensorForm, result_layout, device) -> BoundCall:
    x_strides = strides_of(problem.x_shape, result_layout)
    tiles = _tiles(problem, config)
    fields = _params(problem, (*x_strides, *w.strides, *dy.strides), 0, tiles)
    smem_bytes = config.smem_bytes(_acc_bytes(problem.dtype))
    residues = min(problem.stride[0], problem.h) * min(problem.stride[1], problem.w)
    grid = tiles[0] * tiles[1] * problem.groups * residues
    launch = PositionalLaunch(text, device, grid, config.threads, smem_bytes, _PARAMS_FORMAT, fields)
    x_shape = problem.x_shape

    def dgrad(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = dy.new_empty_strided(x_shape, x_strides)
        launch(dx.data_ptr(), w.data_ptr(), dy.data_ptr(), 0, 0)
        return dx

    return dgrad


def pixel_parts(problem: Problem, config: Config, sm_count: int) -> tuple[int, int]:
    """wgrad: into how many parts the pixels are cut to fill the device, and the pixels of a part."""
    pixels = problem.n * problem.p * problem.q
    tiles_m, tiles_n = _tiles(problem, config)
    blocks = tiles_m * tiles_n * problem.groups
    wanted = max(1, _WAVES * sm_count * config.min_blocks // blocks)
    least = _MIN_PART_STAGES * config.tile_e
    per_part = max(least, ceil_div(pixels, wanted))
    per_part = min(ceil_div(per_part, config.tile_e) * config.tile_e, 1 << 29)
    return ceil_div(pixels, per_part), per_part


def _bind_wgrad(problem, config, text, dy: TensorForm, x: TensorForm, result_layout, device) -> BoundCall:
    dw_strides = strides_of(problem.w_shape, result_layout)
    tiles = _tiles(problem, config)
    parts, per_part = pixel_parts(problem, config, device_facts(device.index).sm_count)
    fields = _params(problem, (*x.strides, 0, 0, 0, 0, *dy.strides), per_part, tiles)
    acc_bytes = _acc_bytes(problem.dtype)
    grid = tiles[0] * tiles[1] * problem.groups * parts
    launch = PositionalLaunch(text, device, grid, config.threads, config.smem_bytes(acc_bytes), _PARAMS_FORMAT, fields)
    sum_parts = bind_sum(problem.dtype, problem.w_shape, dw_strides, parts, device)
    partial_elems = parts * problem.k * problem.c_per_group * problem.r * problem.s
    acc_dtype = torch.float64 if acc_bytes == 8 else torch.float32
    w_shape = problem.w_shape

    def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        partials = x.new_empty(partial_elems, dtype=acc_dtype)
        launch(x.data_ptr(), 0, dy.data_ptr(), 0, partials.data_ptr())
        dw = x.new_empty_strided(w_shape, dw_strides)
        sum_parts(dw.data_ptr(), partials.data_ptr())
        return dw

    return wgrad


def shipped_sources() -> list[KernelSource]:
    """One source per entry and representative configuration: every tile, dtype, layout and direction takes part."""
    sources = {}
    for problem in _representative_problems():
        shapes = {
            "fprop": (problem.x_shape, problem.w_shape),
            "dgrad": (problem.y_shape, problem.w_shape),
            "wgrad": (problem.y_shape, problem.x_shape),
        }[problem.direction]
        first, second = (TensorForm(strides_of(shape, problem.layout), True) for shape in shapes)
        for config in configs(problem):
            text = source(problem, config, first, second, problem.layout)
            sources[text.digest] = text
    return [*sources.values(), *direct_sums.shipped_sources()]


def _representative_problems() -> Iterator[Problem]:
    """Layers that meet every tile: the flagship's 5x9 filter, a 3x3, a stem, a grouped and a depthwise layer."""
    layers = (
        {"c": 32, "k": 64, "r": 5, "s": 9, "dilation": (2, 3)},
        {"c": 64, "k": 128, "r": 3, "s": 3},
        {"c": 3, "k": 64, "r": 7, "s": 7, "stride": (2, 2)},
        {"c": 96, "k": 48, "r": 3, "s": 3, "groups": 3},
        {"c": 32, "k": 64, "r": 3, "s": 5, "groups": 4},
        {"c": 16, "k": 32, "r": 7, "s": 7, "groups": 16},
    )
    for layer in layers:
        dtypes = ELEMENTS if layer in layers[:1] or layer in layers[-1:] else (torch.float32,)
        for dtype, layout, direction in product(dtypes, ("nchw", "nhwc"), DIRECTIONS):
            bias = direction == "fprop"
            yield Problem(direction, n=2, h=64, w=64, bias=bias, dtype=dtype, layout=layout, **layer)
