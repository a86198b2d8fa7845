"""Which tiles ``halo_sm80`` has for a layer, and which should be fastest; costs are cycles of a multiprocessor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm80.tile import COLUMN_ISSUES, COPY_ISSUES, WARP_TILES, Layer, Tile, Tiling

_LATENCY = 2500  # cycles from the first copy of a tile to its first product, and from its last one to the next tile
_MOST_ISSUES, _WARP_ISSUES = 0.8, 0.2  # instructions per cycle: of a scheduler, of a warp that waits for its operands
_MEMORY_RATE = 18  # bytes of device memory per cycle
_PIECE_BYTES = 12  # what a piece of a pixel, or of a row, costs beside its bytes
_MOST_HALO = 1.05  # times the least that a tile stages, where pieces of a pixel are copied
_GATHER_ISSUES = 20  # instructions that stage a piece through registers
_SECOND_BUFFER, _LATE_OUTPUTS = (
    1.7,
    1.5,
)  # blocks that a second buffer, or outputs that go while the next tile comes, are worth
_MOST_COLS, _MOST_PIXELS = 512, 2048  # of a tile


def cost(tiling: Tiling, sm_count: int, max_smem_bytes: int) -> float:
    """Cycles of the launch, roughly: what overlaps between the blocks of a multiprocessor is counted once."""
    tile, layer = tiling.tile, tiling.layer
    resident = tiling.resident(max_smem_bytes)
    n, p, q = tiling.tiles
    tiles = n * p * q * layer.classes * tiling.group_tiles * tiling.filter_tiles
    rate = 4 * min(_MOST_ISSUES, _WARP_ISSUES * resident * tile.warps / 4)  # instructions per cycle
    loads, products = _multiply_cycles(tiling)
    compute = max(_issues(tiling) / rate, loads + products * 0.2, products + loads * 0.2)
    memory = _memory_bytes(tiling) / _MEMORY_RATE
    overlap = resident * (_LATE_OUTPUTS if tiling.late else _SECOND_BUFFER if tile.depth == 2 else 1.0)
    step = max(memory, compute) + (min(memory, compute) + _LATENCY) / overlap
    waves = tiles / (sm_count * resident)
    waves = ceil_div(tiles, sm_count * resident) if tiling.persists else max(1.0, waves + 0.3)
    return step * tiling.chunks * waves * resident


def _issues(tiling: Tiling) -> float:
    """Instructions of all warps in one step."""
    tile, layer = tiling.tile, tiling.layer
    single = layer.elem_bytes == 4
    copied = COPY_ISSUES + (3 + tile.copy_bytes if single else 0)
    column = COLUMN_ISSUES * (2 if single else 1)
    column += tiling.part_rows * (copied if tile.copy_bytes else _GATHER_ISSUES)
    staging = 0 if tiling.boxes else ceil_div(tiling.columns, tile.threads) * tile.warps * column
    loads = tile.m_tiles * ((6 if tile.in_row else 8) if tile.split else (3 if tile.in_row else 4))
    slice_issues = loads + tile.n_tiles * (1 + tile.m_tiles) + 5
    stores = tile.m_tiles * tile.n_tiles * (4 if tiling.four_filters else 8 if tiling.y_pairs else 16)
    write = (40 + 8 * tile.m_tiles + stores) / tiling.chunks
    return staging + 120 * tile.warps + tiling.items * (tiling.slices * slice_issues + write)


def _multiply_cycles(tiling: Tiling) -> tuple[float, float]:
    """Cycles of one step that shared memory takes to give operands, and the tensor cores to multiply."""
    tile = tiling.tile
    warp_items = ceil_div(tiling.items, tile.warps) * tile.warps * tiling.slices
    return (
        warp_items * (tile.m_tiles * 4 + tile.n_tiles * 2 + 1),
        warp_items * 2.0 * tile.m_tiles * tile.n_tiles,
    )


def _memory_bytes(tiling: Tiling) -> float:
    """Bytes of device memory that one step counts as: lines of neighbouring tiles, and weights, come from the L2."""
    tile, layer = tiling.tile, tiling.layer
    outputs = tiling.pixels * tiling.tile_filters * tile.tile_groups * layer.elem_bytes / tiling.chunks
    line_bytes = tiling.runs * tiling.run * layer.elem_bytes * tile.tile_groups * tile.chunk_channels
    own = min(1.0, tile.tile_p * layer.move_h / tiling.lines)
    weights = tiling.weight_bytes if tiling.chunks > tiling.weight_buffers or not tiling.persists else 0
    read = tile.tile_n * tiling.lines * line_bytes * (0.4 + 0.6 * own)
    if not layer.x_copy and tile.tile_q < layer.cols:
        read *= 1 + _PIECE_BYTES / (tiling.runs * tiling.run * layer.elem_bytes)
    if layer.y_inner:
        outputs *= 1 + _PIECE_BYTES / (tile.tile_groups * min(layer.filters, tiling.tile_filters) * layer.elem_bytes)
    elif tile.tile_q < layer.cols:
        outputs *= 1 + _PIECE_BYTES / (tile.tile_q * layer.elem_bytes)
    return outputs + read + 0.5 * weights


def _cuts(extent: int, parts: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    """The extent cut into equal ``parts``, and the ``sizes`` below it, largest first."""
    equal = {ceil_div(extent, count) for count in parts}
    return sorted(equal | {each for each in sizes if each < extent}, reverse=True)


def staging(layer: Layer) -> list[tuple[bool, int, int, int]]:
    """SPLIT, UNIT_BYTES, COPY_BYTES and STAGED_PX that fit how x is stored, best first."""
    group_bytes = layer.channels * layer.elem_bytes
    unit = 8 if group_bytes <= 8 else 16 if group_bytes <= 16 else 32
    if layer.elem_bytes == 4 and (layer.x_copy == 0 or layer.channels < 4):
        return [(True, 4, 4 * layer.x_run, layer.x_run)]
    pairs = layer.move_w % 2 == 0 and layer.reach_w == layer.taps_s - 1 and layer.channels < 4
    if layer.elem_bytes == 2 and pairs and layer.x_run > 1:
        return [(True, 2, 2 * layer.x_run, layer.x_run)]
    return [(False, unit, min(unit, layer.x_copy), 1 if layer.x_copy else min(4, layer.x_run))]


def _chunks(layer: Layer) -> list[int]:
    """Channels of a chunk: all, or whole units, most first."""
    unit_elems = staging(layer)[0][1] // layer.elem_bytes
    step = max(unit_elems, 4 if unit_elems == 1 and layer.channels % 4 == 0 else 1)
    parts = [ceil_div(ceil_div(layer.channels, count), step) * step for count in (2, 3, 4, 8)]
    few = [step * count for count in (1, 2, 4)]
    return sorted({layer.channels, *(each for each in (*parts, *few) if each < layer.channels)}, reverse=True)


def _warp_tiles(eights: int) -> list[tuple[int, int]]:
    """M_TILES and N_TILES for so many eights of filters: those that leave few of them out, and are not too small."""

    def padded(n_tiles: int) -> int:
        return ceil_div(eights, n_tiles) * n_tiles

    tiles = [tile for tile in WARP_TILES if tile[1] >= min(eights, 3)]
    least = min(padded(n_tiles) for _, n_tiles in tiles)
    return [tile for tile in tiles if 4 * padded(tile[1]) <= 5 * least]


def all_tiles(layer: Layer, chunk: int) -> Iterator[Tile]:
    """Every candidate that takes ``chunk`` channels at once, whether it fits or not."""
    eights = ceil_div(layer.filters, 8)
    shapes = product(staging(layer), _warp_tiles(eights), (4, 8), (1, 2))
    for (split, unit, copy, run), (m_tiles, n_tiles), warps, depth in shapes:
        for n_items in sorted({1, 2, ceil_div(eights, n_tiles)}):
            if (n_items - 1) * n_tiles >= eights or n_items > 8:
                continue
            shape = (m_tiles, n_tiles, warps, depth, split, unit, copy, run)
            yield from (Tile(*shape, *pixels, n_items, chunk) for pixels in _pixel_tiles(layer, n_items * n_tiles))


@lru_cache(maxsize=64)
def _pixel_tiles(layer: Layer, eights: int) -> tuple[tuple[int, int, int, int], ...]:
    """Images, rows, columns and groups of a tile, of 16 to 2048 pixels where the layer has as many."""
    found = []
    groups = [each for each in (1, 2, 4, 8) if each == 1 or (each <= layer.groups and eights == 1)]
    for tile_q in _cuts(layer.cols, (1, 2, 3, 4), (16, 64)):
        if tile_q > _MOST_COLS or tile_q < min(8, layer.cols):
            continue
        for tile_p in _cuts(layer.rows, (1, 2, 4, 8), (1, 2, 4, 16)):
            whole = tile_p == layer.rows and tile_q == layer.cols
            images = [1, 2, 4, 8, 16, 32] if whole else [1]
            for tile_n, tile_groups in product(images, groups):
                pixels = tile_n * tile_p * tile_q
                enough = pixels >= 96 or tile_p == layer.rows or tile_q == layer.cols
                if enough and pixels <= _MOST_PIXELS and tile_n < 2 * layer.n:
                    found.append((tile_n, tile_p, tile_q, tile_groups))
    return tuple(found)


@lru_cache(maxsize=1024)
def fits(layer: Layer, max_smem_bytes: int) -> bool:
    """Whether some tile fits a device."""
    return any(
        Tiling(layer, tile).invalid(max_smem_bytes) is None
        for chunk in reversed(_chunks(layer))
        for tile in all_tiles(layer, chunk)
    )


def _of_least_halo(fitting: list[Tiling], max_smem_bytes: int) -> list[Tiling]:
    """The tilings that stage least beyond their outputs: a piece of a pixel costs about the same from everywhere.

    With two buffers and enough warps, where that is possible.
    """
    ahead = [each for each in fitting if each.tile.depth == 2]
    busy = [each for each in ahead if each.resident(max_smem_bytes) * each.tile.warps >= 16]
    fitting = busy or ahead or fitting
    least = min((each.staged for each in fitting), default=0.0)
    return [each for each in fitting if each.staged <= _MOST_HALO * least]


@lru_cache(maxsize=1024)
def tilings(layer: Layer, sm_count: int, max_smem_bytes: int) -> tuple[Tiling, ...]:
    """The tilings that fit a device, best first. Smaller chunks only where larger ones leave no room for two blocks."""
    fitting: list[Tiling] = []
    for chunk in _chunks(layer):
        found = (Tiling(layer, tile) for tile in all_tiles(layer, chunk))
        fitting += [each for each in found if each.invalid(max_smem_bytes) is None]
        if any(each.resident(max_smem_bytes) > 1 for each in fitting):
            break
    if layer.x_copy and layer.groups > 1:
        fitting = _of_least_halo(fitting, max_smem_bytes)
    return tuple(sorted(fitting, key=lambda each: cost(each, sm_count, max_smem_bytes)))
