// What a launch of halo_sm90 computes, in which order, and which pixels its staged and its written places stand for.
//
// The output is cut into tile columns: a strip of columns of one image and, where rows are dilated, one residue class
// of rows; and a tile column into tiles, one below the other, each a consumer's. ROWS: a tile is RUNS
// rows, and a line, which is what a slot holds, one row of the input. FLAT: a tile is TILE_PX pixels of all rows of the
// tile column, which may be that of all images, laid end to end, `pitch` pixels each, where neighbouring rows share the
// zeros between them; a line is all rows that meet a work tile.
//
// SHARED_TILE: a work tile is one tile, of which each consumer has a block of filters of its own. Else it is two tiles
// of one block, one for each consumer. To have one multiply while the other writes, the second starts its tiles in the
// middle of the taps: first the taps of phase 1, then, with the next work tile, those of phase 0. Both always multiply
// by the same weights, and their tiles are always neighbours.
#pragma once

#include "families/halo_sm90/edges.cuh"
#include "families/halo_sm90/conv/scheduler.cuh"
#include "kernels/numeric.cuh"
#include "kernels/ptx/tensor_map.cuh"

// Where the rows of M are those of residue classes of dx, the constant CLASS_ROWS stands in the place of PACKS, and
// structs have fields more: no source without a stride of its output changes.
#ifdef CLASS_ROWS
#define CLASSES 1
#define PACKS (64 / CLASS_ROWS)
#else
#define CLASSES 0
#endif

namespace hc {

constexpr int TILES = SHARED_TILE ? 1 : 2;  // of a work tile

// Scalars of a launch. Rows and columns of strided problems are split into planes, one per residue of the stride.
template <class Elem, class YElem, class Bias>
struct HaloParams {
    TensorMap x_map, y_map;  // of TMA boxes of the input, of the output
#ifdef HALO_ROWS
    TensorMap halo_map;  // as x_map
#endif
    const Elem* x;
    const unsigned char* packed;  // weights, as pack.cu writes them
    YElem* y;
    const Bias* bias;
    unsigned* not_finite;  // set if a sum is not finite that the fix-up may have to sum again
#ifdef AFFINE_AND_RESIDUAL
    const Elem* residual;  // where y is, there the residual is
#endif
#ifdef HALO_ROWS
    const Elem* halo;  // (n, channels of all groups, halo_rows, w)
#endif
    i64 x_n, x_c, x_h, x_w;               // strides of the input in elements
    i64 y_n, y_k, y_row, y_col, y_first;  // of the output: one step of each index, and where the launch begins
    int n, h, w, channels;                // of the input; channels of one group
    int rows, cols, filters;              // of the output; filters of one group
    int pad_top, pad_left;                // input pixels before the first staged one of output (0, 0)
    int stride_h, stride_w;               // input lines (columns) from one output row (column) of the tile to the next
    int taps_r, taps_s, dil_h, dil_w;  // taps, and pixels between them; a line of ROWS is one row, so dil_h is 1 there
    int class_move, line_move;         // input rows per residue class of output rows, per line
    int pack_h, pack_w;                // output rows, columns that one row of M stands for; pack_w: column residues
    int strip_cols;                    // output columns of a strip
    int lead;                          // pixels by which a line begins before its strip (Y_JOINED)
    Divisor pitch;                     // pixels from row to row of a line (FLAT)
    Divisor wrap;                      // rows after which the next image begins in a tile column (FLAT)
    Divisor plane_px;                  // pixels of a plane
    int planes_w, slot_px;             // planes side by side; pixels of a slot
    int boxes, single_boxes,
        box_px;                            // TMA boxes of a work tile's line, of a line of one tile; pixels of each
    Divisor box_units;                     // units of a box that is transposed
    int mid_chunk, mid_r, mid_s, mid_tap;  // where phase 0 ends, which starts at 0 in all of them; SHARED_TILE: where
                                           // a consumer lets the other one begin its next tile
    int next_chunk, next_r, next_s;        // where phase 1 starts, which ends with the last of them
    int blocks, chunks;                    // blocks (SHARED_TILE: pairs of them) in a group; chunks of channels
    int slot_bytes;                        // of a slot
    Schedule schedule;
#ifdef EDGE_COLS
    int edge_from, edge_to;  // input columns that outputs read
#endif
#ifdef HALO_ROWS
    i64 halo_n, halo_c, halo_h, halo_w;  // strides of the halo in elements
    int halo_top, halo_rows;             // rows above the image, and all that there are
#endif
#ifdef CLASS_ROWS
    Divisor class_rows;      // rows of M of a run (classes.cuh)
    int class_runs;          // of a group
    int step_h, step_w;      // output pixels from one place to the next
    int before_h, before_w;  // of the first place that are none
#endif
};

// One phase of a work tile of a segment: its taps, and which of the segment's tiles it takes, counted from the
// segment's first one. At its start the second consumer has none yet in phase 0, and at its end the first has none any
// more.
struct Phase {
    int chunk, chunk_end, r, r_end, s, s_end;
    int first_tile, tiles;

    template <class P>
    __device__ __forceinline__ Phase(const P& p, int phase, int work_tile, int work_tiles)
        : chunk(begin(phase, p.next_chunk)),
          chunk_end(phase ? p.chunks : p.mid_chunk),
          r(begin(phase, p.next_r)),
          r_end(phase ? p.taps_r : p.mid_r),
          s(begin(phase, p.next_s)),
          s_end(phase ? p.taps_s : p.mid_s),
          first_tile(phase || work_tile == 0 ? TILES * work_tile : TILES * work_tile - 1),
          tiles(TILES == 2 && (phase || (work_tile > 0 && work_tile < work_tiles)) ? 2 : 1) {}
    // All taps are in phase 1, or it begins where `next` says.
    static __device__ __forceinline__ int begin(int phase, int next) { return FIRST_PHASE || !phase ? 0 : next; }
};

// Lines of a tile column, counted from the segment's first tile on: [first, end).
struct LineRange {
    int first, end;
};

// All lines that `tiles` tiles of RUNS rows read at taps [r, r_end).
template <int TILE_RUNS, class P>
__device__ __forceinline__ LineRange lines_of(const P& p, int first_tile, int tiles, int r, int r_end) {
    const int rows = tiles * TILE_RUNS, first = first_tile * TILE_RUNS * p.stride_h;
    return {first + r, first + (rows - 1) * p.stride_h + r_end};
}

// A pixel of a tensor: its offset in elements, and whether it is inside.
struct Place {
    i64 offset;
    bool inside;
};

struct ImageRow {
    int n, row;
};

// Row `row` of a FLAT tile column, halo rows included: the image, and the row counted from the image's first staged
// one.
template <class P>
__device__ __forceinline__ ImageRow flat_row(const P& p, const WorkTile& column, int row) {
    const int images = p.wrap.quotient(row);
    return {column.image + images, row - images * p.wrap.value};
}

// The input row that line `line` of a tile column holds (ROWS), or its row `line` (FLAT). It may be outside the tensor.
template <bool IS_FLAT, class P>
__device__ __forceinline__ ImageRow staged_row(const P& p, const WorkTile& column, int line) {
    if (IS_FLAT) {
        const ImageRow at = flat_row(p, column, line);
        return {at.n, at.row * p.stride_h - p.pad_top};
    }
    return {column.image, column.cls * p.class_move + line * p.line_move - p.pad_top};
}

// The input column of a tile column's first staged pixels.
template <class P>
__device__ __forceinline__ int staged_col(const P& p, const WorkTile& column) {
    return column.strip * p.strip_cols * p.stride_w - p.pad_left;
}

// The input pixel that place `px` of a slot holds, whose (first) row is line `line`.
template <bool IS_FLAT, class P>
__device__ __forceinline__ Place staged_pixel(const P& p, const WorkTile& column, int line, int px) {
    const int plane = p.plane_px.quotient(px), in_plane = px - plane * p.plane_px.value;
    const int plane_row = plane / p.planes_w, plane_col = plane - plane_row * p.planes_w;
    const int row = IS_FLAT ? p.pitch.quotient(in_plane) : 0;
    const int col = in_plane - row * p.pitch.value;
    const ImageRow at = staged_row<IS_FLAT>(p, column, line + row);
    const int h = row_at_edge(p, at.row + plane_row);
    const int w = at_edge<COL_EDGE>(staged_col(p, column) + col * p.stride_w + plane_col, p.w);
    const bool inside = at.n < p.n && (unsigned)h < (unsigned)p.h && (unsigned)w < (unsigned)p.w;
    return {at.n * p.x_n + h * p.x_h + w * p.x_w, inside && px < p.slot_px};
}

// Row and column of the output, of an image.
struct Output {
    int n, row, col;
    bool inside;
};

// The output pixel of row `row` and its pixel `px` (ROWS), or of pixel `px` (FLAT) of a tile column, for output
// `residue` of an output pack, or that residue class.
template <bool IS_FLAT, class P>
__device__ __forceinline__ Output output_of(const P& p, const WorkTile& column, int row, int px, int residue) {
    int n = column.image, col = px;
    if (IS_FLAT) {
        const int down = p.pitch.quotient(px);
        const ImageRow at = flat_row(p, column, down);
        n = at.n, row = at.row, col = px - down * p.pitch.value;
    }
    const int residue_row = p.pack_w == 1 ? residue : residue / p.pack_w,
              residue_col = residue - residue_row * p.pack_w;
    if constexpr (CLASSES) {
        const int out_row = (column.cls + p.schedule.classes.value * row) * p.step_h + residue_row - p.before_h;
        const int out_col = (column.strip * p.strip_cols + col) * p.step_w + residue_col - p.before_w;
        return {n, out_row, out_col,
                n < p.n && col < p.strip_cols && (unsigned)out_row < (unsigned)p.rows &&
                    (unsigned)out_col < (unsigned)p.cols};
    }
    const int out_row = column.cls + p.schedule.classes.value * (row * p.pack_h + residue_row);
    const int out_col = (column.strip * p.strip_cols + col) * p.pack_w + residue_col;
    return {n, out_row, out_col,
            n < p.n && col < p.strip_cols && out_row < p.rows && (unsigned)out_col < (unsigned)p.cols};
}

template <class P>
__device__ __forceinline__ Place place_of(const P& p, const Output& at) {
    return {p.y_first + at.n * p.y_n + at.row * p.y_row + at.col * p.y_col, at.inside};
}

}  // namespace hc
