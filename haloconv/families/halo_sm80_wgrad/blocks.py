"""How halo_sm80_wgrad cuts a layer: tiles, warps, shared memory, and the cost model that chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm80_wgrad.layer import Layer
from haloconv.problem import Problem

STEP = 8  # pixels of one mma, in words
BANKS = 32
MAX_THREADS = 256
_BLOCK_SMEM_RESERVE = 1 << 10  # the system's, of each block; one block may have all but this of a multiprocessor
_SM_REGISTERS = 1 << 16
_MAX_BLOCKS = 6  # of a multiprocessor
_SAMPLED_ROWS = 96  # of the product, by which pitches are judged
_REGISTERS_BESIDE = 58  # of a thread, beside its sums, offsets and loads, so that nothing spills
_MAX_WARP_TILES = 20  # of 16 rows x 8 columns: 80 sums a thread
_WARP_TILES_ALONE = 36  # where nothing smaller holds all taps


@dataclass(frozen=True)
class Block:
    """A block: output pixels of a tile, channels, filters and groups, warps along the axes of the product.

    ``min_blocks`` is the number of blocks that must fit a multiprocessor, and so caps the registers of a thread.
    """

    tile_p: int
    tile_q: int
    tile_c: int
    tile_k: int
    tile_g: int
    warps_m: int
    warps_n: int
    warps_e: int
    min_blocks: int = 1

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.tile_g * self.warps_m * self.warps_n * self.warps_e

    def warp_tiles(self, layer: Layer) -> tuple[int, int]:
        """Blocks of 16 rows and of 8 columns of a warp."""
        rows = self.tile_c * layer.r * layer.s
        m = ceil_div(ceil_div(rows, 16), self.warps_m)
        if layer.pixel_pairs:
            m = ceil_div(ceil_div(self.tile_c * layer.r, 8), self.warps_m) * layer.tap_pairs
        return m, ceil_div(ceil_div(self.tile_k, 8), self.warps_n)


@dataclass(frozen=True)
class Pitches:
    """Words from one residue of columns, line and channel of x to the next, and from one filter of dy to the next."""

    plane: int
    line: int
    x: int
    y: int


def invalid(block: Block, layer: Layer, max_smem_bytes: int) -> str | None:
    """Why such a block cannot run the layer with ``max_smem_bytes`` per block, or None."""
    if block.warps * 32 > MAX_THREADS:
        return f"has {block.warps} warps; a block has at most {MAX_THREADS // 32}"
    m, n = block.warp_tiles(layer)
    if m * n > _WARP_TILES_ALONE or m > _WARP_TILES_ALONE // 2:
        return f"has {m} x {n} tiles of sums in a warp; registers hold {_WARP_TILES_ALONE}"
    if block.tile_g > 1 and (block.tile_c, block.tile_k) != (layer.c, layer.k):
        return "has several groups, but not all channels and filters of each"
    for name, reading, tile in (("channels", layer.x, block.tile_c), ("filters", layer.y, block.tile_k)):
        if reading.inner and block.tile_g * tile % reading.vec:
            return f"has {block.tile_g * tile} {name}, which are no whole loads of {reading.vec}"
        if layer.pieces and tile % 8:
            return f"has {tile} {name}, which are no whole pieces of 8"
    needed = smem_bytes(block, layer)
    if needed > max_smem_bytes:
        return f"needs {needed} bytes of shared memory per block; the device has {max_smem_bytes}"
    return None


def _x_window(block: Block, layer: Layer) -> tuple[int, int]:
    """Lines and columns of x that a tile stages."""
    lines = (block.tile_p - 1) * layer.stride[0] + (layer.r - 1) * layer.dilation[0] + 1
    cols = (block.tile_q - 1) * layer.stride[1] + (layer.s - 1) * layer.dilation[1] + 1
    cols += 2 if layer.pixel_pairs else 0  # of words whose taps do not exist
    return lines, cols if layer.x.inner else ceil_div(cols + layer.x.vec - 1, layer.x.vec) * layer.x.vec


def channels_inner(block: Block) -> bool:
    """Whether neighbouring rows of the product are channels, else taps (CHANNELS_INNER of work.cuh)."""
    return block.tile_c % 8 == 0


def pitches(block: Block, layer: Layer) -> Pitches:
    """The pitches under which reading the operands of an mma meets the fewest banks twice."""
    lines, cols = _x_window(block, layer)
    y = block.tile_p * block.tile_q // layer.word_px
    if layer.pieces:
        planes = (4 * lines * cols, 4 * y + 4)
        return Pitches(0, 4 * cols, *(words + (4 - words) % BANKS for words in planes))
    if layer.pixel_pairs:
        return Pitches(0, *_pixel_pair_pitches(layer, lines, cols, block.tile_c), y + (4 - y) % 8)
    return Pitches(*_x_pitches(layer, lines, cols, block.tile_c, channels_inner(block)), y + (4 - y) % 8)


@lru_cache(maxsize=1 << 12)
def _x_pitches(layer: Layer, lines: int, cols: int, tile_c: int, inner: bool) -> tuple[int, int, int]:
    """Pitches of planes, lines and channels."""
    plane = ceil_div(ceil_div(cols, layer.stride[1]), 4) * 4
    planes = range(plane, plane + 16, 4) if layer.stride[1] > 1 and layer.s > 1 else (plane,)
    line_pads = range(0, BANKS, 4) if layer.r > 1 and not inner else (0,)

    def place(pads: tuple[int, int, int]) -> tuple[int, int, int]:
        line = pads[0] * layer.stride[1] + pads[1]
        return pads[0], line, lines * line + pads[2]

    def order(at: tuple[int, int, int]) -> tuple[int, int]:
        return _passes(layer, tile_c, inner, *(pitch % BANKS for pitch in at)), at[2]

    return min((place(pads) for pads in product(planes, line_pads, range(0, BANKS, 4))), key=order)


@lru_cache(maxsize=1 << 12)
def _pixel_pair_pitches(layer: Layer, lines: int, cols: int, tile_c: int) -> tuple[int, int]:
    """Pitches of lines and channels, multiples of whole copies."""
    unit = 4

    def passes(pitch: tuple[int, int]) -> tuple[int, int]:
        total = 0
        for first in range(0, tile_c * layer.r, 8):
            banks: dict[int, set[int]] = {}
            for row, word in product(range(first, min(first + 8, tile_c * layer.r)), range(4)):
                at = row // layer.r * pitch[1] + row % layer.r * layer.dilation[0] * pitch[0] + word * layer.stride[1]
                banks.setdefault(at % BANKS, set()).add(at)
            total += max(map(len, banks.values()))
        return total, pitch[1]

    start = ceil_div(cols // 2, unit) * unit
    every = product(range(start, start + BANKS, unit), range(0, BANKS, unit))
    return min(((line, lines * line + pad) for line, pad in every), key=passes)


@lru_cache(maxsize=1 << 16)
def _passes(layer: Layer, tile_c: int, inner: bool, plane: int, line: int, channel: int) -> int:
    """Passes of shared memory over the first rows of the product, 8 rows x 4 pixels at a time; pitches modulo 32."""
    rows = tile_c * layer.r * layer.s
    passes = 0
    for first in range(0, min(rows, _SAMPLED_ROWS), 8):
        words: dict[int, set[tuple[int, ...]]] = {}
        for row in range(first, min(first + 8, rows)):
            c, tap = (row % tile_c, row // tile_c) if inner else (row // (layer.r * layer.s), row % (layer.r * layer.s))
            col = tap % layer.s * layer.dilation[1]
            at = c * channel + tap // layer.s * layer.dilation[0] * line
            at += col % layer.stride[1] * plane + col // layer.stride[1]
            for pixel in range(4):
                # Places of different lines and channels differ, whatever they are modulo the banks.
                words.setdefault((at + pixel) % BANKS, set()).add(
                    (c, tap // layer.s, col % layer.stride[1], at + pixel)
                )
        passes += max(map(len, words.values()))
    return passes


def smem_bytes(block: Block, layer: Layer) -> int:
    """Size of ``Smem``, or of ``Exchange`` if that is larger (halo_sm80_wgrad/work.cuh)."""
    at = pitches(block, layer)
    channels, filters = block.tile_g * block.tile_c, block.tile_g * block.tile_k
    if layer.pieces:
        channels, filters = channels // 8, filters // 8
    words = ceil_div(channels * at.x, 4) * 4 + filters * at.y
    m, n = block.warp_tiles(layer)
    exchanged = block.warps // block.warps_e * m * n * 512 if block.warps_e > 1 else 0
    return max(ceil_div(words, 4) * 16 * (2 if layer.copied else 1), exchanged)


def _block_extents(layer: Layer, groups: int) -> Iterator[tuple[int, int, int]]:
    """Channels, filters and groups of a block."""
    for count in (1, 2, 4, 8):
        if count == 1 or (count <= groups and max(layer.c, layer.k) <= 32):
            yield layer.c, layer.k, count
    cs = {layer.c, *(c for c in (1, 2, 4, 8, 16, 32) if c < layer.c)}
    ks = {layer.k, *(k for k in (8, 16, 24, 32, 48, 64, 96, 128) if k < layer.k)}
    yield from ((c, k, 1) for c, k in product(sorted(cs), sorted(ks)) if (c, k) != (layer.c, layer.k))


def _tile_cols(q: int, layer: Layer) -> int:
    """Columns of a tile for rows of ``q`` outputs: of few sizes, so that many image sizes share a kernel."""
    if layer.copied:
        whole = 16 if layer.pixel_pairs else 4
        return ceil_div(ceil_div(q, ceil_div(q, 128 if layer.pixel_pairs else 64)), whole) * whole
    return next((cols for cols in (8, 16, 32) if q <= cols), 32 if ceil_div(q, 32) * 32 < ceil_div(q, 64) * 64 else 64)


@lru_cache(maxsize=256)
def all_blocks(layer: Layer, groups: int, tile_q: int, max_smem_bytes: int) -> tuple[Block, ...]:
    """Every block that runs the layer, with as many to a multiprocessor as fit."""
    found = []
    along_m, rows = ((1, 2, 3, 4), (1, 2, 4, 7, 8, 14, 16)) if layer.copied else ((1, 2, 4, 8), (1, 2, 4, 8, 16))
    warps = [w for w in product(along_m, (1, 2, 4), (1, 2, 4, 8)) if w[0] * w[1] * w[2] <= 8]
    for (c, k, g), (m, n, e), tile_p in product(_block_extents(layer, groups), warps, rows):
        block = Block(tile_p, tile_q, c, k, g, m, n, e)
        most_m = ceil_div(c * layer.r, 8) if layer.pixel_pairs else ceil_div(c * layer.r * layer.s, 16)
        if not 4 <= block.warps <= 8 or e > tile_p or m > most_m or n > ceil_div(k, 8):
            continue
        tiles = block.warp_tiles(layer)
        if (
            tiles[0] * tiles[1] <= _WARP_TILES_ALONE
            and tile_p * tile_q <= 512
            and not invalid(block, layer, max_smem_bytes)
        ):
            found.append(replace(block, min_blocks=_resident(block, layer, max_smem_bytes)))
    small = [each for each in found if each.warp_tiles(layer)[0] * each.warp_tiles(layer)[1] <= _MAX_WARP_TILES]
    return tuple(small or found)


def _resident(block: Block, layer: Layer, max_smem_bytes: int) -> int:
    m, n = block.warp_tiles(layer)
    registers = 4 * m * n + 2 * m + n + _loaded_words(m * n) + _REGISTERS_BESIDE
    by_smem = (max_smem_bytes + _BLOCK_SMEM_RESERVE) // (smem_bytes(block, layer) + _BLOCK_SMEM_RESERVE)
    by_registers = _SM_REGISTERS // (32 * block.warps * ceil_div(registers, 8) * 8)
    return max(1, min(by_smem, by_registers, _MAX_BLOCKS))


def ranked_blocks(problem: Problem, layer: Layer, max_smem_bytes: int) -> list[Block]:
    """The blocks that run a problem, best first by the cost model."""
    found = all_blocks(layer, problem.groups, _tile_cols(problem.q, layer), max_smem_bytes)
    return sorted(found, key=lambda block: cost(block, problem, layer))


def cost(block: Block, problem: Problem, layer: Layer) -> float:
    """Cycles that the whole problem takes on one multiprocessor."""
    blocks = ceil_div(layer.c, block.tile_c) * ceil_div(layer.k, block.tile_k)
    blocks *= ceil_div(problem.groups, block.tile_g)
    images = problem.n / layer.halves if problem.n > 1 else 1 / layer.halves
    stages = images * ceil_div(problem.p, block.tile_p) * ceil_div(problem.q, block.tile_q)
    steps = images * problem.p * ceil_div(problem.q, STEP * layer.word_px) / stages
    if layer.pieces:
        steps = images * problem.p * problem.q / 16 / stages
    stage = _copied_cost(block, layer, steps) if layer.copied else None
    return blocks * stages * (stage or _stage_cost(block, layer, problem.groups, steps))


@lru_cache(maxsize=1 << 14)
def _copied_cost(block: Block, layer: Layer, steps: float) -> float:
    """Cycles of a stage of ``steps`` steps where rows are copied as they are, while the stage before is multiplied."""
    m, n = block.warp_tiles(layer)
    warps_mn = block.warps // block.warps_e
    reads = 2 * m // layer.tap_pairs * (layer.tap_pairs + max(1, layer.stride[1] // 2)) + 2 * n
    if layer.pieces:
        reads = 4 * m + 2 * n
    lines, cols = _x_window(block, layer)
    x, y = block.tile_g * block.tile_c * lines * cols, block.tile_g * block.tile_k * block.tile_p * block.tile_q
    copies = (x / layer.x.vec + y / layer.y.vec) / 32
    units = (
        steps * warps_mn * reads + (x + y) / 64,  # shared memory
        steps * warps_mn * m * n * 1.6,  # tensor cores
        (steps * warps_mn * (reads + 4 * m + m * n + 8) + copies * 18) / 4,
        (x + y) * 2 / 20,  # device memory
    )
    alone = steps / block.warps_e * (1.2 * reads + 70 + 6.4 * m * n) + copies / block.warps * 40 + 400
    waiting = max(alone, 2000) / block.min_blocks
    return max(*units, waiting) + 0.2 * (sum(units) + waiting)


@lru_cache(maxsize=1 << 14)
def _stage_cost(block: Block, layer: Layer, groups: int, steps: float) -> float:
    """Cycles of a stage of ``steps`` steps: what the busiest unit takes, or waiting where too few blocks hide it."""
    m, n = block.warp_tiles(layer)
    warps_mn = block.warps // block.warps_e
    reads = 4 * m * _bank_passes(block, layer) + 2 * n
    lines, cols = _x_window(block, layer)
    staged = (
        (block.tile_g * block.tile_c, lines * cols, layer.x, layer.c * groups),
        (block.tile_g * block.tile_k, block.tile_p * block.tile_q, layer.y, layer.k * groups),
    )
    words = passes = instructions = loads = traffic = 0.0
    for channels, pixels, reading, neighbours in staged:
        each, vec = channels * pixels, reading.vec
        gap = neighbours / channels if reading.inner else 1.0  # of memory to what is read of it
        chunk_bytes = channels * layer.elem_bytes
        lines_met = vec * min(gap, max(1.0, 128 / chunk_bytes))
        words += each
        passes += each / (32 * vec) * (lines_met + vec * (2 if reading.inner else 1))
        instructions += each / 32 * (5 + (20 + 6 * layer.halves) / vec)
        loads += ceil_div(each, 32 * block.warps * min(_loaded_words(m * n), 8 * vec))
        traffic += each * 4 * min(gap, max(1.0, 32 / chunk_bytes))
    units = (
        steps * warps_mn * reads + passes,  # shared memory and first-level cache
        steps * warps_mn * m * n * 1.6,  # tensor cores
        (steps * warps_mn * (6 * m + 2 * n + m * n + 6) + instructions) / 4,
        traffic / 24,  # L2
    )
    alone = steps / block.warps_e * (1.2 * reads + 70 + 6.4 * m * n) + 700 * loads + 200
    waiting = alone / block.min_blocks
    return max(*units, waiting) + 0.2 * (sum(units) + waiting)


def _loaded_words(warp_tiles: int) -> int:
    """``LOADED_WORDS`` of halo_sm80_wgrad/work.cuh."""
    return 16 if warp_tiles > 5 else 24


def _bank_passes(block: Block, layer: Layer) -> float:
    """Passes of shared memory for one read of an operand of rows."""
    at = pitches(block, layer)
    places = (at.plane % BANKS, at.line % BANKS, at.x % BANKS)
    rows = min(block.tile_c * layer.r * layer.s, _SAMPLED_ROWS)
    return _passes(layer, block.tile_c, channels_inner(block), *places) / ceil_div(rows, 8)
