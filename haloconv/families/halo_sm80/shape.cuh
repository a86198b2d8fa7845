// What a launch of halo_sm80 computes, how it is cut into tiles, and what lies where in shared memory.
//
// A tile is tile_n images, tile_p rows and tile_q columns of the output (of one class of pixels) for tile_groups groups
// and tile_filters filters of each. Its places are numbered end to end, row_slots a row: as many as there are columns,
// or (IN_ROW) rounded up to 16, so that the rows of a fragment are neighbours. Shared memory: the tables, the weights
// of a chunk, and the input as [plane of every group][image][row][column][UNIT_BYTES] with padded rows and planes.
#pragma once

#include "families/halo_sm80/weights.cuh"
#include "kernels/activation.cuh"
#include "kernels/small_divisor.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace hc {

constexpr int THREADS = 32 * WARPS;
constexpr int TABLE_WORDS = TAP_PAIRS ? 4 : SPLIT ? 2 : 1;  // that a lane has of a slice
constexpr int UNIT_ELEMS = UNIT_BYTES / (int)sizeof(elem_t);
constexpr int PIECE_BYTES = SPLIT ? UNIT_BYTES : COPY_BYTES ? COPY_BYTES : 8;  // of a pixel, staged at a time

template <bool>
struct OffsetOf {
    using type = int;
};
template <>
struct OffsetOf<true> {
    using type = i64;
};
using offset_t = OffsetOf<I64_OFFSETS != 0>::type;  // inside a tensor, in elements
using bias_t = BiasOf<elem_t, AFFINE>::type;

struct Params {
    TensorMap x_map;  // BOXES: planes of single channels
    const elem_t* x;
    const char* w;  // PACKED: weights, as pack.cu writes them; else the filter
    elem_t* y;
    const bias_t* bias;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as y
#endif
    i64 x_n, x_c, x_h, x_w;  // strides in elements: of the gathered tensor, of the output
    i64 y_n, y_k, y_h, y_w;
    FilterStrides strides;
    Extents extents;
    int n, h, width;                                                    // of the gathered tensor
    int channels, filters, groups;                                      // channels and filters of a group
    int classes, tile_groups, group_tiles, tile_filters, filter_tiles;  // filters: multiples of 8 * N_TILES
    SmallDivisor tile_n, tile_p, row_slots;                             // images, rows, places of a row of a tile
    int tile_q;                                                         // columns: those of the first places of a row
    int tiles_n, tiles_p, tiles_q, blocks;      // tiles; blocks that share those of one class, groups and filters
    int chunk_channels, chunks, parts, slices;  // parts: channels or atoms of a tap; slices: of the class of most taps
    int taps_first;
    int columns;  // that threads stage: parts of the lines of one piece, below each other
    SmallDivisor cols, row_parts, planes, pieces;  // runs of a line; parts; planes of a group; pieces of a pixel
    int rows, part_rows;                           // lines of an image, of a part
    int row_bytes, image_bytes, plane_bytes;
    int row_move;                   // bytes between the first taps of neighbours below each other
    SmallDivisor m_items, n_items;  // of a tile: M_TILES * 16 pixels, N_TILES * 8 filters
    int k_bytes, table_bytes, weight_bytes, weight_buffers, x_bytes;
};

// What a block computes.
struct Work {
    int cls, group, filter;  // the first group, and the first filter of each group
    int first, tiles;        // tiles first, first + blocks, ...
    Axes axes;
    int low_h, low_w;  // the least that a tap adds to a pixel's position
    int ks;            // words or atoms of a chunk
};

__device__ __forceinline__ Work this_work(const Params& p) {
    Work work;
    unsigned index = blockIdx.x;
    work.cls = index % p.classes, index /= p.classes;
    work.filter = index % p.filter_tiles * p.tile_filters, index /= p.filter_tiles;
    work.group = index % p.group_tiles * p.tile_groups, index /= p.group_tiles;
    work.first = index;
    work.tiles = (p.tiles_n * p.tiles_p * p.tiles_q - work.first + p.blocks - 1) / p.blocks;
    work.axes = axes_of<DGRAD>(p.extents, work.cls);
    work.low_h = lowest(work.axes.vertical), work.low_w = lowest(work.axes.horizontal);
    work.ks = p.parts * work.axes.vertical.taps * row_words(work.axes.horizontal);
    return work;
}

// Place m of a tile, inside it; columns from tile_q on are none.
__device__ __forceinline__ Pixel pixel_of(const Params& p, int m) {
    const int line = p.row_slots.quotient(m), image = p.tile_p.quotient(line);
    return {image, line - image * p.tile_p.value, m - line * p.row_slots.value};
}

// One step: a chunk of channels of a tile, and what lies first in its buffer. Runs of pixels begin at multiples of
// STAGED_PX.
struct Step {
    Pixel tile;      // first image, row and column of the class
    int h, w, lead;  // row and column of the input, which may be outside; pixels before the first word
    int chunk;
    const elem_t* x;  // the address, if it were there
};

__device__ __forceinline__ Step step_at(const Params& p, const Work& work, int step) {
    const Axis &v = work.axes.vertical, &h = work.axes.horizontal;
    const unsigned index = work.first + step / p.chunks * p.blocks, row = index / (unsigned)p.tiles_q;
    Step at;
    at.tile = {int(row / (unsigned)p.tiles_p) * p.tile_n.value, int(row % (unsigned)p.tiles_p) * p.tile_p.value,
               int(index - row * p.tiles_q) * p.tile_q};
    at.chunk = step % p.chunks;
    const int col = h.base + at.tile.col * h.pixel_move + work.low_w;
    at.lead = col & (STAGED_PX - 1);
    at.h = v.base + at.tile.row * v.pixel_move + work.low_h, at.w = col - at.lead;
    at.lead -= first_half(h);
    const i64 channel = (i64)work.group * p.channels + at.chunk * p.chunk_channels;
    at.x = p.x + at.tile.n * p.x_n + channel * p.x_c + at.h * p.x_h + at.w * p.x_w;
    return at;
}

// The tables of a block in shared memory: an offset for each k, and two for each place of a tile.
struct Tables {
    int *ks, *x;
    offset_t* y;
};

__device__ __forceinline__ Tables tables_of(const Params& p, char* smem) {
    int* const x = reinterpret_cast<int*>(smem + p.k_bytes);
    return {reinterpret_cast<int*>(smem), x, reinterpret_cast<offset_t*>(x + p.m_items.value * (M_TILES * 16))};
}

}  // namespace hc
