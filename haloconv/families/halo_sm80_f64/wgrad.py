"""Host half of halo_sm80_f64/wgrad.cu: weight gradients in double precision on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ceil_div, divisor, few_apart, named, why_not_direction
from haloconv.families.halo_sm80_f64.tile import OCTET, copy_elems
from haloconv.families.reduce.partials import of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request

KERNEL = "halo_sm80_f64/wgrad"
_STEP_PIXELS = 16
_MOST_COL_BITS = 4
_MOST_STEPS = 1 << 30  # a step's number, and a row's, are 32-bit integers
LEAST_PART_STEPS = 32  # for the start and the sums of a block not to count
_WAVES = 2
_STEP_COST = 0.15  # the model: what a step costs beyond its products, of a step of 128 filters and 96 channels


@dataclass(frozen=True)
class Block:
    """Fragments of a warp (16 filters, 8 channels each), warps of a tap along both, taps, and steps under way.

    Registers must allow ``min_blocks`` blocks a multiprocessor.
    """

    m_tiles: int
    n_tiles: int
    warps_m: int
    warps_n: int
    taps: int
    mma_k: int
    stages: int
    min_blocks: int

    def __str__(self) -> str:
        return f"filters{self.filters} channels{self.channels} taps{self.taps} m_tiles{self.m_tiles} mma_k{self.mma_k}"

    @property
    def filters(self) -> int:
        return 16 * self.m_tiles * self.warps_m

    @property
    def channels(self) -> int:
        return 8 * self.n_tiles * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.taps


BLOCKS = (
    Block(2, 4, 4, 1, 3, 8, 3, 1),
    Block(2, 4, 2, 1, 3, 8, 3, 2),
    Block(2, 4, 4, 2, 1, 8, 3, 1),
    Block(2, 4, 2, 2, 1, 8, 3, 3),
    Block(1, 2, 1, 1, 3, 8, 3, 4),
    Block(1, 2, 2, 1, 1, 8, 3, 4),
)


@dataclass(frozen=True)
class Cut:
    """A problem in blocks of one kind; its pixels in parts of at most ``part_steps`` steps."""

    problem: Problem
    block: Block
    sm_count: int

    @property
    def col_bits(self) -> int:
        """A strip has so many columns, as a power of two: 16, or those of a narrower image."""
        return min(_MOST_COL_BITS, (self.problem.q - 1).bit_length())

    @property
    def strips(self) -> int:
        return ceil_div(self.problem.q, 1 << self.col_bits)

    @property
    def x_cols(self) -> int:
        """Columns of x that a strip and the taps of a block meet."""
        reach = (self.block.taps - 1) * self.problem.dilation[1]
        return ((1 << self.col_bits) - 1) * self.problem.stride[1] + reach + 1

    @property
    def x_slots(self) -> int:
        return (_STEP_PIXELS >> self.col_bits) * self.x_cols

    @property
    def smem_bytes(self) -> int:
        def pitch(elems: int) -> int:
            return ceil_div(elems, 16) * 16 + 4

        stage = _STEP_PIXELS * pitch(self.block.filters) + self.x_slots * pitch(self.block.channels)
        return 8 * self.block.stages * stage

    @property
    def steps(self) -> int:
        return ceil_div(self.problem.n * self.problem.p, _STEP_PIXELS >> self.col_bits) * self.strips

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles of a group: of filters, of channels, and of a row of taps."""
        problem, block = self.problem, self.block
        return (
            ceil_div(problem.k_per_group, block.filters),
            ceil_div(problem.c_per_group, block.channels),
            ceil_div(problem.s, block.taps),
        )

    @property
    def blocks(self) -> int:
        """Blocks of a part."""
        filters, channels, taps = self.tiles
        return self.problem.groups * filters * channels * taps * self.problem.r

    @property
    def part_steps(self) -> int:
        slots = self.sm_count * self.block.min_blocks
        wanted = max(1, _WAVES * slots // self.blocks if self.blocks > slots else slots // self.blocks)
        return max(min(LEAST_PART_STEPS, self.steps), ceil_div(self.steps, wanted))

    @property
    def parts(self) -> int:
        return ceil_div(self.steps, self.part_steps)

    @property
    def cost(self) -> float:
        """Cost by the model: products of blocks that run at the same time, rounded up to whole waves.

        Products of one block hide a part of what another's step costs: two blocks of 64 filters took 0.90 to 0.95 of
        the time of one of 128 in a probe of C and U-Net's 3x3 on an NVIDIA H200.
        """
        block = self.block
        step = block.filters * block.channels * block.taps / (128 * 96) + _STEP_COST / min(block.min_blocks, 2) ** 2
        waves = ceil_div(self.blocks * self.parts, self.sm_count * block.min_blocks)
        return waves * block.min_blocks * self.part_steps * step


def why_not(request: Request) -> str | None:
    """None if some block takes the request, else a sentence that says why not."""
    problem = request.problem
    reason = why_not_direction(problem, "wgrad")
    if reason is not None:
        return reason
    if problem.groups > 1 and min(problem.c_per_group, problem.k_per_group) < OCTET:
        return "halo_sm80_f64 takes groups of at least 8 channels and 8 filters"
    found = cuts(request)
    if not found:
        return "no block of halo_sm80_f64 fits shared memory"
    if max(cut.steps for cut in found) >= _MOST_STEPS or problem.n * problem.p >= _MOST_STEPS:
        return "the output has 2^30 rows or more"
    return None


def configs(request: Request) -> list[Config]:
    """The best block of each number of filters and taps."""
    ranked = sorted(cuts(request), key=lambda each: each.cost)
    found = few_apart(ranked, lambda each: (each.block.filters, each.block.taps))
    return [Config(KERNEL, str(each.block), each) for each in found]


def cuts(request: Request) -> list[Cut]:
    """The cuts that fit the device."""
    facts = request.facts
    found = (Cut(request.problem, block, facts.sm_count) for block in BLOCKS)
    return [each for each in found if each.smem_bytes <= facts.max_smem_bytes]


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    cut: Cut = config.derived
    sums = of_filter(request, cut.parts)
    shape = LaunchShape(cut.blocks * cut.parts, cut.block.threads, cut.smem_bytes)
    launch = Launch(source(request, cut.block), request.device, shape, _fields(request, cut, sums.elems))
    return wgrad_call(launch, request, sums)


def source(request: Request, block: Block) -> KernelSource:
    """The specialised source: extents of images and filters are run-time values."""
    problem = request.problem
    constants: dict[str, int | str] = {
        "DY_COPY": copy_elems(request.first, problem.k_per_group),
        "X_COPY": copy_elems(request.second, problem.c_per_group),
        "M_TILES": block.m_tiles,
        "N_TILES": block.n_tiles,
        "WARPS_M": block.warps_m,
        "WARPS_N": block.warps_n,
        "TAPS": block.taps,
        "MMA_K": block.mma_k,
        "STAGES": block.stages,
        "MIN_BLOCKS": block.min_blocks,
    }
    return kernel_source(KERNEL, "halo_sm80_f64_wgrad", constants)


def _fields(request: Request, cut: Cut, part_elems: int) -> dict[str, Value]:
    """The scalars of ``Params`` in halo_sm80_f64/wgrad.cu."""
    problem = request.problem
    filter_tiles, channel_tiles, tap_tiles = cut.tiles
    return {
        **named("x", "nchw", request.second.strides),
        **named("y", "nkpq", request.first.strides),
        **{"part_elems": part_elems, "h": problem.h, "width": problem.w, "q": problem.q},
        **{"taps_r": problem.r, "taps_s": problem.s, "stride_h": problem.stride[0], "stride_w": problem.stride[1]},
        **{"dil_h": problem.dilation[0], "dil_w": problem.dilation[1]},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2]},
        **{"channels": problem.c_per_group, "filters": problem.k_per_group, "groups": problem.groups},
        **{"filter_tiles": filter_tiles, "channel_tiles": channel_tiles, "tap_tiles": tap_tiles},
        **{"lines": problem.n * problem.p, "rows": divisor(problem.p), "strips": divisor(cut.strips)},
        **{"x_cols": divisor(cut.x_cols), "x_slots": cut.x_slots, "col_bits": cut.col_bits},
        **{"steps": cut.steps, "part_steps": cut.part_steps},
    }
