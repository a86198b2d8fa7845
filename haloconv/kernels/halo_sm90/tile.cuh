// What a launch of halo_sm90 computes, in which order, and which pixels its staged and its written places stand for.
//
// Pixels are numbered along a virtual line of segments, each PITCH pixels: a segment is one row of one image (FLAT), or
// the row of one image that a staged line holds (else). Neighbouring segments share the zero pixels between them.
#pragma once

#include "numeric.cuh"

namespace hc {

// Division by a number that the host knows: for 0 <= n < 2^31 the quotient is the high word of n * magic, shifted.
// Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divisor {
    int value;
    unsigned magic;
    int shift;

    __device__ __forceinline__ int quotient(unsigned n) const { return value == 1 ? n : __umulhi(n, magic) >> shift; }
};

// Scalars of a launch. Rows and columns of strided problems are split into planes, one per residue of the stride.
template <class Elem>
struct HaloParams {
    const Elem* x;
    const unsigned char* packed;  // weights, as halo_sm90_pack.cu writes them
    Elem* y;
    const Elem* bias;
    unsigned* not_finite;                 // set if a sum of a pack is not finite
    i64 x_n, x_c, x_h, x_w;               // strides of the input in elements
    i64 y_n, y_k, y_row, y_col, y_first;  // of the output: one step of each index, and where the launch begins
    int n, h, w, channels;                // of the input; channels of one group
    int rows, cols, filters;              // of the output; filters of one group
    int pad_top, pad_left;                // input pixels before the first staged one of output (0, 0)
    int first_tap_px;                     // staged pixels left of the first tap, where four of them are aligned
    int stride_h, stride_w;               // input lines (columns) from one output row (column) of the tile to the next
    int taps_r, taps_s, dil_h, dil_w;    // taps, and pixels between them; lines hold one row, so dil_h is 1 unless FLAT
    int classes, class_move, line_move;  // output rows of one class are `classes` apart; input rows per class and line
    int pack_h, pack_w, pack_filters;    // output rows, columns that one row of M stands for; M rows of each of them
    Divisor pitch, segment_rows;         // pixels of a segment; rows of one image (FLAT)
    int strips, strip_cols;              // strips of columns that are numbered apart
    Divisor plane_px;                    // pixels of a plane
    int planes_w, slot_px;               // planes side by side; pixels of a slot
    int tiles, tile_step;                // tiles of a strip, and the pixels from one to the next
    int steps, lines, new_lines;         // tiles below each other; staged lines of a tile; those new after a step down
    int blocks, chunks;                  // blocks of M filters in a group; chunks of channels
    int slots, slot_bytes, stages;       // rings of input lines and of weights
    int lead;                            // taps that the first consumer is ahead at the start
    int total;                           // tiles of the launch
};

struct Tile {
    int block, strip, cls, step;
    unsigned first_px;  // on the virtual line
};

template <class P>
__device__ __forceinline__ Tile tile_at(const P& p, unsigned index) {
    const unsigned cls = index / (unsigned)p.steps, tile = cls / (unsigned)p.classes;
    const unsigned strip = tile / (unsigned)p.tiles, block = strip / (unsigned)p.strips;
    return {int(block), int(strip - block * p.strips), int(cls - tile * p.classes), int(index - cls * p.steps),
            (tile - strip * p.tiles) * p.tile_step};
}

// The tiles of one block of threads: a run of neighbours, as equal as whole tiles allow.
struct Share {
    int begin, end;
};

template <class P>
__device__ __forceinline__ Share share_of(const P& p) {
    return {int((i64)p.total * blockIdx.x / gridDim.x), int((i64)p.total * (blockIdx.x + 1) / gridDim.x)};
}

// Whether tile `index` stands right below the one before it and keeps its lines.
template <class P>
__device__ __forceinline__ bool steps_down(const P& p, Share share, int index) {
    return p.new_lines < p.lines && index > share.begin && index < share.end &&
           (unsigned)index % (unsigned)p.steps != 0;
}

// A pixel of a tensor: its offset in elements, and whether it is inside.
struct Place {
    i64 offset;
    bool inside;
};

struct Segment {
    int n, row, col;  // row is 0 unless FLAT
};

template <bool IS_FLAT, class P>
__device__ __forceinline__ Segment segment_at(const P& p, unsigned px) {
    const int segment = p.pitch.quotient(px);
    const int col = px - segment * p.pitch.value;
    if (!IS_FLAT) return {segment, 0, col};
    const int image = p.segment_rows.quotient(segment);
    return {image, segment - image * p.segment_rows.value, col};
}

// The input pixel that place `px` of line `line` holds.
template <bool IS_FLAT, int TILE_ROWS, class P>
__device__ __forceinline__ Place staged_pixel(const P& p, const Tile& tile, int line, int px) {
    const int plane = p.plane_px.quotient(px);
    const int plane_row = plane / p.planes_w, plane_col = plane - plane_row * p.planes_w;
    const Segment at = segment_at<IS_FLAT>(p, tile.first_px + (px - plane * p.plane_px.value));
    const int h = IS_FLAT
                      ? at.row * p.stride_h + plane_row - p.pad_top
                      : tile.cls * p.class_move + (tile.step * TILE_ROWS * p.stride_h + line) * p.line_move - p.pad_top;
    const int w = (tile.strip * p.strip_cols + at.col) * p.stride_w + plane_col - p.pad_left;
    const bool inside = at.n < p.n && (unsigned)h < (unsigned)p.h && (unsigned)w < (unsigned)p.w;
    return {at.n * p.x_n + h * p.x_h + w * p.x_w, inside && px < p.slot_px};
}

// The output pixel of place `px` in row `row` of the tile, for the packed row and column `phase`.
template <bool IS_FLAT, int TILE_ROWS, class P>
__device__ __forceinline__ Place written_pixel(const P& p, const Tile& tile, int row, unsigned px, int phase) {
    const Segment at = segment_at<IS_FLAT>(p, tile.first_px + px);
    const int tile_row = IS_FLAT ? at.row : tile.step * TILE_ROWS + row;
    const int out_row = tile.cls + p.classes * (tile_row * p.pack_h + phase / p.pack_w);
    const int out_col = (tile.strip * p.strip_cols + at.col) * p.pack_w + phase % p.pack_w;
    const bool inside = at.n < p.n && at.col < p.strip_cols && out_row < p.rows && out_col < p.cols;
    return {p.y_first + at.n * p.y_n + out_row * p.y_row + out_col * p.y_col, inside};
}

}  // namespace hc
