"""Host half of families/direct/direct.cu: every legal problem on CUDA cores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from haloconv import support
from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, ceil_div, named
from haloconv.families.reduce.partials import bind_sum, of_filter
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.layout import strides_of
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "direct/direct"
_DIRECTION_NUMBERS = {"fprop": 0, "dgrad": 1, "wgrad": 2}
_PROMOTE_ES = 512  # reduction indices between two promotions
_PROMOTED_ES = 1024  # reduction indices from which on sums are promoted: one run of fp32 sums would round too much
_GATHER_COST = 20  # staging a gathered element, in multiplies: from the rates of tiles of 32 and 64 rows on an H200
_WAVES = 2  # wgrad: blocks per resident block slot, so that little is in the last wave
_MIN_PART_STAGES = 32  # wgrad: stages that a block must have for its start and end not to count


@dataclass(frozen=True)
class Tiling:
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
        return ceil_div(stages + entries + promoted, 16) * 16


def extents(problem: Problem) -> tuple[int, int]:
    """Rows of the product, and its columns (0 where they are pixels, whose number is known at run time only)."""
    if problem.direction == "dgrad":
        return problem.c_per_group, 0
    filter_elems = problem.c_per_group * problem.r * problem.s
    return problem.k_per_group, filter_elems if problem.direction == "wgrad" else 0


# Measured best first among tiles of one height that spill no register on any architecture. Narrow tiles gather much per
# multiply: few reduction indices per stage keep their loads in registers.
_TILES = (
    Tiling(128, 64, 8, 8, 8, min_blocks=3),
    Tiling(64, 128, 8, 8, 8, min_blocks=3),
    Tiling(64, 64, 8, 8, 8, min_blocks=4),
    Tiling(32, 256, 16, 8, 8, min_blocks=2),
    Tiling(32, 128, 8, 8, 8, min_blocks=4),
    Tiling(32, 64, 8, 8, 8, min_blocks=8),
    Tiling(16, 256, 8, 4, 8, min_blocks=3),
    Tiling(16, 128, 8, 4, 8, min_blocks=6),
    Tiling(16, 64, 8, 4, 8, min_blocks=12),
    Tiling(8, 256, 4, 4, 4, min_blocks=3),
    Tiling(8, 128, 4, 4, 4, min_blocks=6),
    Tiling(8, 64, 4, 4, 4, min_blocks=12),
    Tiling(4, 256, 4, 4, 4, min_blocks=6),
    Tiling(4, 128, 4, 4, 4, min_blocks=12),
)
# A double takes two registers: small thread tiles.
_TILES_FP64 = (
    Tiling(64, 64, 8, 4, 4, min_blocks=1),
    Tiling(32, 64, 8, 4, 4, min_blocks=2),
    Tiling(16, 64, 8, 4, 4, min_blocks=4),
    Tiling(8, 64, 4, 4, 4, min_blocks=8),
    Tiling(4, 128, 4, 4, 4, min_blocks=8),
)


def tilings(problem: Problem) -> list[Tiling]:
    """Candidates, best first. They depend on filter, channels and dtype only: new image sizes never compile."""
    rows, cols = extents(problem)
    reduction = problem.r * problem.s * (problem.k_per_group if problem.direction == "dgrad" else problem.c_per_group)
    double = problem.dtype == torch.float64
    tiles = _TILES_FP64 if double else _TILES
    tile_m = min((tile.tile_m for tile in tiles), key=lambda each: ceil_div(rows, each) * (each + _GATHER_COST))
    candidates = [tile for tile in tiles if tile.tile_m == tile_m]
    fitting = [tile for tile in candidates if cols == 0 or tile.tile_n < 2 * cols] or candidates[-1:]
    if double or (problem.direction != "wgrad" and reduction < _PROMOTED_ES):
        return fitting
    return [replace(tile, promote_stages=_PROMOTE_ES // tile.tile_e) for tile in fitting]


def invalid(tiling: Tiling, problem: Problem, max_smem_bytes: int) -> str | None:
    """Why a block of this tile cannot run on a device with ``max_smem_bytes`` per block, or None."""
    needed = tiling.smem_bytes(_acc_bytes(problem.dtype))
    if needed > max_smem_bytes:
        return f"needs {needed} bytes of shared memory per block; the device has {max_smem_bytes}"
    return None


def best_tiling(problem: Problem, max_smem_bytes: int) -> Tiling:
    """The first candidate that fits the device. Raises RuntimeError if none does."""
    for tiling in tilings(problem):
        reason = invalid(tiling, problem, max_smem_bytes)
        if reason is None:
            return tiling
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


def stagings(request: Request) -> tuple[bool, Staging, Staging]:
    """Whether the channel runs fastest in an index over (channel, tap), and how operands A and B are read."""
    problem, first, second = request.problem, request.first, request.second
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


def source(request: Request, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part."""
    problem = request.problem
    channels_inner, a, b = stagings(request)
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
        "TILE_M": tiling.tile_m,
        "TILE_N": tiling.tile_n,
        "TILE_E": tiling.tile_e,
        "THREAD_M": tiling.thread_m,
        "THREAD_N": tiling.thread_n,
        "MIN_BLOCKS": tiling.min_blocks,
        "PROMOTE_STAGES": tiling.promote_stages,
        "SMEM_BYTES": tiling.smem_bytes(_acc_bytes(problem.dtype)),
        "CHANNELS_INNER": int(channels_inner),
        "A_E_LANES": int(a.e_lanes),
        "A_VEC": a.vec,
        "B_VEC": b.vec,
        "ROWS_CONTIGUOUS": int(request.result_layout == "nhwc" and problem.direction != "wgrad"),
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source(KERNEL, f"direct_{problem.direction}", constants)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return support.why_not(request.problem, request.device)


def configs(request: Request) -> list[Config]:
    """The one of a request. Raises RuntimeError if no tile fits the device."""
    tiling = best_tiling(request.problem, request.facts.max_smem_bytes)
    return [Config(KERNEL, config_key(tiling), tiling)]


def _acc_bytes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4


def _tiles(problem: Problem, tiling: Tiling) -> tuple[int, int]:
    """Tiles along the rows and the columns of the product (of the largest residue class in dgrad)."""
    rows, cols = extents(problem)
    if problem.direction == "fprop":
        cols = problem.n * problem.p * problem.q
    elif problem.direction == "dgrad":
        cols = problem.n * ceil_div(problem.h, problem.stride[0]) * ceil_div(problem.w, problem.stride[1])
    return ceil_div(rows, tiling.tile_m), ceil_div(cols, tiling.tile_n)


def pixel_parts(problem: Problem, tiling: Tiling, sm_count: int) -> tuple[int, int]:
    """wgrad: into how many parts the pixels are cut to fill the device, and the pixels of a part."""
    pixels = problem.n * problem.p * problem.q
    tiles_m, tiles_n = _tiles(problem, tiling)
    blocks = tiles_m * tiles_n * problem.groups
    wanted = max(1, _WAVES * sm_count * tiling.min_blocks // blocks)
    least = _MIN_PART_STAGES * tiling.tile_e
    per_part = max(least, ceil_div(pixels, wanted))
    per_part = min(ceil_div(per_part, tiling.tile_e) * tiling.tile_e, 1 << 29)
    return ceil_div(pixels, per_part), per_part


def _strides(request: Request) -> dict[str, int]:
    """Strides of x, w and y (or their gradients) in elements; 0 for wgrad's w, whose sums are dense."""
    first, second, result = request.first.strides, request.second.strides, request.result_strides
    x, w, y = {
        "fprop": (first, second, result),
        "dgrad": (result, second, first),
        "wgrad": (second, (0, 0, 0, 0), first),
    }[request.problem.direction]
    return {**named("x", "nchw", x), **named("w", "kcrs", w), **named("y", "nkpq", y)}


def _launch(request: Request, tiling: Tiling, slices: int, pixels_per_part: int = 0) -> Launch:
    """The launch of (x, w, y, bias, partials); ``slices`` residues or parts of pixels have blocks of their own."""
    problem, (tiles_m, tiles_n) = request.problem, _tiles(request.problem, tiling)
    fields = {
        **_strides(request),
        "pixels_per_part": pixels_per_part,
        **{"n": problem.n, "h": problem.h, "w_extent": problem.w, "p": problem.p, "q": problem.q},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2]},
        **{"tiles_m": tiles_m, "tiles_n": tiles_n, "groups": problem.groups},
    }
    grid = tiles_m * tiles_n * problem.groups * slices
    shape = LaunchShape(grid, tiling.threads, tiling.smem_bytes(_acc_bytes(problem.dtype)))
    return Launch(source(request, tiling), request.device, shape, fields)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, dgrad(dy, w) -> dx or wgrad(dy, x) -> dw."""
    return {"fprop": _bind_fprop, "dgrad": _bind_dgrad, "wgrad": _bind_wgrad}[request.problem.direction](
        request, config.derived
    )


def _bind_fprop(request: Request, tiling: Tiling) -> BoundCall:
    launch = _launch(request, tiling, 1)
    shape, strides = request.result_shape, request.result_strides

    def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty_strided(shape, strides)
        if b is None:
            launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), 0, 0)
        else:
            b = b if b.is_contiguous() else b.contiguous()
            launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), b.data_ptr(), 0)
        return y

    return fprop


def _bind_dgrad(request: Request, tiling: Tiling) -> BoundCall:
    problem = request.problem
    launch = _launch(request, tiling, min(problem.stride[0], problem.h) * min(problem.stride[1], problem.w))
    shape, strides = request.result_shape, request.result_strides

    def dgrad(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = dy.new_empty_strided(shape, strides)
        launch(dx.data_ptr(), w.data_ptr(), dy.data_ptr(), 0, 0)
        return dx

    return dgrad


def _bind_wgrad(request: Request, tiling: Tiling) -> BoundCall:
    problem, shape, strides = request.problem, request.result_shape, request.result_strides
    parts, per_part = pixel_parts(problem, tiling, request.facts.sm_count)
    launch = _launch(request, tiling, parts, per_part)
    sums = of_filter(request, parts)
    sum_parts = bind_sum(sums, request.device)
    partial_elems, acc_dtype = sums.total_elems, sums.acc_dtype

    def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        partials = x.new_empty(partial_elems, dtype=acc_dtype)
        launch(x.data_ptr(), 0, dy.data_ptr(), 0, partials.data_ptr())
        dw = x.new_empty_strided(shape, strides)
        sum_parts(dw.data_ptr(), partials.data_ptr(), 0)
        return dw

    return wgrad
