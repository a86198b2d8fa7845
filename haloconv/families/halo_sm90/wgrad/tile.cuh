// What a block of halo_sm90_wgrad computes, in which order, and its shared memory.
//
// A tile is some channels, filters and taps of a group. It sums over lines: rows of x that are whole strides from the
// row that its first tap meets, by image, class of rows (of which there are line_step), strip of STRIP columns of dy,
// from top to bottom. Each part of a tile is a block that takes a run of lines. With line i of a class come lines i - r
// of dy, one for each row r of the tile's taps: every pair of lines belongs to the block that has the line of x.
// BOX_ROWS neighbouring lines come at a time, a box: short lines would cost more in barriers than in products.
#pragma once

#include "families/halo_sm90/wgrad/order.cuh"
#include "kernels/band_walk.cuh"
#include "kernels/ceil_div.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/tensor_map.cuh"
#ifdef EDGE_ROWS
#include "families/halo_sm90/edges.cuh"
#endif

namespace hc::wgrad {

using elem_t = ELEM;

constexpr int SIZE = sizeof(elem_t), PIECE = 16 / SIZE;  // bytes of an element; elements of 16 bytes
constexpr int DEPTH = 32 / SIZE;                         // pixels of a wgmma: a step
constexpr int CONSUMERS = OWNERS * SPLIT_P, CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr bool Y_TRANSPOSED = Y_PLANES < 0 && SIZE == 4;
enum {
    TERMS = OPERAND_TERMS,  // TF32 values that a value is multiplied as
    X_INNER = X_PLANES < 0,
    Y_INNER = Y_PLANES < 0 && SIZE == 2,
    Y_RAW_BOXES = Y_PLANES > 0 || Y_TRANSPOSED,  // that threads shift or transpose
    LINE_PARTS = STRIP / DEPTH / SPLIT_P,        // a consumer's steps of a line
    PART_STEPS = LINE_PARTS > 4 ? 4
    : LINE_PARTS < 1            ? 1
                                : LINE_PARTS,  // TERMS > 1: of a partial sum
#ifdef EDGE_ROWS
    ROWS_APART = ROW_EDGE != Edge::ZEROS,  // lines of x that follow one another come from anywhere
    COL_EDGES = COL_EDGE != Edge::ZEROS,   // threads write pixels left and right of lines of x: edges.cuh
#else
    ROWS_APART = 0,
    COL_EDGES = 0,
#endif
    X_BOX_ROWS = ROWS_APART ? 1 : BOX_ROWS,  // lines of x that TMA brings at a time
    X_BOXES = BOX_ROWS / X_BOX_ROWS,         // that it brings for a box
};
constexpr bool SPREAD_ROWS = X_INNER && SIZE == 4 && STRIDE_W % 2 == 1;  // where two rows would share banks
constexpr bool X_STORED = X_LOADS != 0 || X_PLANES > 0, Y_STORED = Y_LOADS != 0 || Y_RAW_BOXES;  // by threads
constexpr bool LOADS = X_STORED || Y_STORED;
enum {
    X_FILLED = COL_EDGES && !X_STORED,  // TMA brings lines of x, and threads fill them up
    EDGE_THREADS = LOADS ? 128 : 96,    // that write edges: where there are any, warps that have nothing else to do
    STORES = LOADS || COL_EDGES,        // which takes registers
};
constexpr int PRODUCER_REGISTERS = STORES ? (CONSUMERS == 2 ? 88 : 80) : CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? (STORES ? 208 : 240) : STORES ? 144 : 160;  // what is left
constexpr int FLUSH_STEPS = 2048;
// Arrivals that fill a line and give it back. A thread that stores a line, or reads what others have stored, arrives
// itself: so each store is ordered by the mbarrier alone, as compute-sanitizer's racecheck judges it. Where TMA writes,
// one thread or one lane of a warp arrives.
constexpr int X_ARRIVALS = X_STORED ? 128 : X_FILLED ? EDGE_THREADS : X_BOXES, Y_ARRIVALS = Y_STORED ? 128 : 1;
constexpr int EMPTY_ARRIVALS = X_STORED ? 128 * CONSUMERS : CONSUMER_WARPS;
// Boxes in the rings. A box of x meets as many boxes of dy, the one that came with it and those AHEAD of it.
constexpr int AHEAD = ceil_div(ROWS - 1, BOX_ROWS), X_STAGES = STAGES, Y_STAGES = STAGES + AHEAD;
constexpr int X_LINES = X_STAGES * BOX_ROWS, Y_LINES = Y_STAGES * BOX_ROWS;
// With several terms a wgmma takes the lines of all rows of taps, one after the other, as its N. So that they follow
// one another at the ring's end, too, its first lines stand there once more.
constexpr int Y_COPIES = TERMS > 1 ? ROWS - 1 : 0;

// Images side by side: pixels of one's cell, the power of two that its columns of dy and a gap fit, and its steps.
enum {
    CELL = 8 << (IMAGE_COLUMNS > 8) + (IMAGE_COLUMNS > 16),
    CELL_STEPS = CELL > DEPTH ? CELL / DEPTH : 1,
};

// Rings of lines in shared memory. INNER: spans of at most 128 bytes of channels, [span][line][pixel][channels],
// swizzled. Else dy is K-major in spans of 128 bytes of pixels, [span][line][filter][pixels], swizzled, and x is
// [line][channel][X_PITCH pixels]. LINE: bytes from a line to the next one; RING: from a span to the next one. With
// several terms x is as it comes, and dy has a ring for each term, Y_TERM bytes apart.
constexpr int X_SPAN = CHANNELS * SIZE < 128 ? CHANNELS : 128 / SIZE, X_ROW_BYTES = X_SPAN * SIZE;
constexpr int Y_SPAN = !Y_INNER ? 128 / SIZE : FILTERS * SIZE < 128 ? FILTERS : 128 / SIZE, Y_ROW_BYTES = Y_SPAN * SIZE;
constexpr int Y_PIXELS = Y_INNER ? STRIP : (STRIP * SIZE + 127) / 128 * 128 / SIZE;  // that a line of dy has room for
constexpr int X_BYTES = BLOCK_CHANNELS * X_PITCH * SIZE, Y_BYTES = BLOCK_FILTERS * Y_PIXELS * SIZE;
constexpr int X_SPANS = X_INNER ? BLOCK_CHANNELS / X_SPAN : 1, X_LINE = X_BYTES / X_SPANS, X_RING = X_LINES * X_LINE;
constexpr int Y_LINE = Y_INNER ? STRIP * Y_ROW_BYTES : BLOCK_FILTERS * 128, Y_SPANS = Y_BYTES / Y_LINE;
constexpr int Y_RING = (Y_LINES + Y_COPIES) * Y_LINE;
enum { Y_TERM = Y_SPANS * Y_RING };

// Raw boxes, as TMA brings them before their lines are shifted: [plane][row of the plane][PIXELS]. A row has the lines
// of a channel as they follow one another in memory, from the aligned piece on in which the first one begins. It has an
// odd number of pieces, so that rows begin in different banks. LINE_PIECES: of a line when it has been shifted.
constexpr int RAW_STAGES = 2;
template <int ROWS_, int PLANES, int LINE_PIXELS, int PIXELS>
struct RawBox {
    static constexpr int COUNT = ROWS_, PLANE_COUNT = PLANES, LINE_PIECES = LINE_PIXELS / PIECE;
    static constexpr int PLANE_ROWS = PLANES ? ROWS_ / PLANES : 0, PITCH = PIXELS * SIZE;
    static constexpr int PLANE_BYTES = (PLANE_ROWS * PITCH + 127) / 128 * 128, BYTES = PLANES * PLANE_BYTES;
    static_assert(PLANES == 0 || ROWS_ % PLANES == 0, "planes have as many rows");
    static_assert(PLANES == 0 || PITCH % 32 == 16, "rows begin in different banks");
};
using RawX = RawBox < BLOCK_CHANNELS, X_PLANES<0 ? 0 : X_PLANES, X_PITCH, X_RAW>;
using RawY = RawBox < BLOCK_FILTERS, Y_PLANES<0 ? 0 : Y_PLANES, STRIP, Y_RAW>;

// Raw boxes of dy before they are transposed: [span][line][Y_RAW pixels][32 filters], swizzled.
constexpr int TRANSPOSED_SPANS = Y_TRANSPOSED ? BLOCK_FILTERS / 32 : 0, TRANSPOSED_SPAN = BOX_ROWS * Y_RAW * 128;
constexpr int TRANSPOSED_BYTES = TRANSPOSED_SPANS * TRANSPOSED_SPAN;
constexpr int Y_RAW_BYTES = Y_TRANSPOSED ? TRANSPOSED_BYTES : RawY::BYTES;

static_assert(CONSUMERS == 2 || CONSUMERS == 3, "registers are dealt out for these");
static_assert(64 % CHANNELS == 0 && CHANNELS >= 8, "a wgmma has whole columns of taps");
static_assert(STAGES > 1, "a line goes back while the next one is multiplied");
static_assert(TERMS == 1 || TERMS == 2 && SIZE == 4 && Y_STORED, "the second term of dy is stored by threads");
static_assert(TERMS == 1 || ROWS == 1 || SPLIT_K == 1, "the filters of a wgmma's lines follow one another");
static_assert(STRIP % DEPTH == 0 && (BOX_ROWS > 1 || Y_PIXELS == STRIP), "a strip is whole steps; of several, spans");
static_assert(X_BYTES % 128 == 0 && (!X_INNER || X_PITCH % 8 == 0), "TMA writes at multiples of 128 bytes");
static_assert(X_INNER || (X_PITCH * SIZE) % 32 == 16, "rows of x in different banks");
static_assert(!Y_TRANSPOSED || SIZE == 4 && BLOCK_FILTERS % 32 == 0 && Y_RAW % 8 == 0,
              "whole swizzled rows of 32 filters");
static_assert(IMAGE_COLUMNS <= CELL && (CELL < DEPTH || IMAGE_COLUMNS > CELL - DEPTH || IMAGE_COLUMNS == 0),
              "only the last step of a cell has pixels that dy lacks");
static_assert(!X_STORED || !X_INNER, "loaded lines have pixels as neighbours");
static_assert(!Y_STORED || !Y_INNER, "loaded lines have pixels as neighbours");

// How lines are dealt out: see band_walk.cuh. A band is a box, a strip a class of rows and a strip of columns.
struct Cut {
    int slabs;          // tiles
    int strips, bands;  // of an image; boxes of one
    int per_block, longer;
};

struct Params {
    TensorMap x_map, y_map;
    const elem_t *x, *dy;
    float* partials;         // [part][tile][owner][sum of a thread][thread]
    i64 x_n, x_c, x_h, x_w;  // strides in elements
    i64 y_n, y_k, y_p, y_q;  // the same
    int h, w, rows, cols;    // of x; of dy
    int channels, filters;   // of a group
    int taps_r, taps_s, stride_h, dil_h, dil_w, pad_top, pad_left;
    int line_step;  // rows of dy between those that two neighbouring rows of a tile's taps meet a line of x with
    Blocks blocks;
    int column_strips;  // strips of columns
    Cut cut;
#ifdef EDGE_ROWS
    int edge_from, edge_to;    // columns of x that outputs read
    int edge_top, image_rows;  // rows that count as x's above the image, and those of the image
#endif
};

// Boxes of several lines are of rows that follow one another in both tensors, and of one strip of columns: there the
// compiler knows what is divided by.
__device__ __forceinline__ int stride_h(const Params& p) { return BOX_ROWS > 1 ? 1 : p.stride_h; }
__device__ __forceinline__ int line_step(const Params& p) { return BOX_ROWS > 1 ? 1 : p.line_step; }
__device__ __forceinline__ int column_strips(const Params& p) { return BOX_ROWS > 1 ? 1 : p.column_strips; }

// The column of x that a tile's first tap meets at column 0 of dy.
__device__ __forceinline__ int first_column(const Params& p, const Tile& tile) {
    return tile.column * p.dil_w - p.pad_left;
}

// The row of the image that is row `at` of x: with a mode, rows that stand above and below it count as x's.
__device__ __forceinline__ int source_row(const Params& p, int at) {
#ifdef EDGE_ROWS
    return at_edge<ROW_EDGE>(at - p.edge_top, p.image_rows);
#else
    return at;
#endif
}

// Columns by which staged lines of x begin before that: boxes and loads of several pixels begin at aligned ones.
// Shifted lines begin anywhere.
__device__ __forceinline__ int lead(const Params& p, const Tile& tile) {
    constexpr int ALIGNED = X_INNER || X_PLANES || X_LOADS < 0 ? 1 : X_LOADS ? X_LOADS : PIECE;
    return first_column(p, tile) & ALIGNED - 1;
}

// Where a run of lines is. Its lines of dy are counted from the oldest one that its first line of x meets.
struct Place {
    int image, column;  // the strip's first column of dy
    int row, row_step;  // of line 0 of x; rows from one line of x to the next
    int dy_row;         // of line 0 of dy

    __device__ __forceinline__ Place(const Params& p, const Tile& tile, const Run& run) {
        const int residue = run.strip / column_strips(p);
        image = run.image, column = (run.strip - residue * column_strips(p)) * STRIP;
        const int top = tile.row * p.dil_h - p.pad_top;  // of x, that the first tap meets with row 0 of dy
        const int strides = top >= 0 ? top / stride_h(p) : -((stride_h(p) - 1 - top) / stride_h(p));  // rounded down
        const int line = residue + run.first * BOX_ROWS * line_step(p);
        row = line * stride_h(p) + (top - strides * stride_h(p)), row_step = line_step(p) * stride_h(p);
        dy_row = line - strides - (ROWS - 1) * line_step(p);
    }
    __device__ __forceinline__ int pixels(const Params& p) const { return min(STRIP, p.cols - column); }
};

// The column of x with which a staged line begins.
__device__ __forceinline__ int column_of_x(const Params& p, const Tile& tile, const Place& place) {
    return place.column * STRIDE_W + first_column(p, tile) - lead(p, tile);
}

struct Smem {
    char *y, *x, *y_raw, *x_raw;
    ptx::u64 *y_full, *y_empty, *x_full;  // a box of x goes back with the oldest box of dy that it met

    ptx::u64 *y_raw_full, *y_raw_empty, *x_raw_full, *x_raw_empty;
    ptx::u64* x_landed;  // X_FILLED: what TMA brings is there

    // Swizzled boxes begin at multiples of 1024 bytes.
    __device__ __forceinline__ explicit Smem(char* smem)
        : y(smem), x(smem + TERMS * Y_TERM + RAW_STAGES * TRANSPOSED_BYTES) {
        y_raw = Y_TRANSPOSED ? y + TERMS * Y_TERM : x + X_LINES * X_BYTES;
        x_raw = x + X_LINES * X_BYTES + RAW_STAGES * RawY::BYTES;
        y_full = reinterpret_cast<ptx::u64*>(x_raw + RAW_STAGES * RawX::BYTES), y_empty = y_full + Y_STAGES;
        x_full = y_empty + Y_STAGES;
        y_raw_full = x_full + X_STAGES, y_raw_empty = y_raw_full + RAW_STAGES;
        x_raw_full = y_raw_empty + RAW_STAGES, x_raw_empty = x_raw_full + RAW_STAGES;
        x_landed = x_raw_empty + RAW_STAGES;
    }
};

__device__ __forceinline__ void begin(const Smem& smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < Y_STAGES; ++i) {
            ptx::mbarrier_init(&smem.y_full[i], Y_ARRIVALS);
            ptx::mbarrier_init(&smem.y_empty[i], EMPTY_ARRIVALS);
        }
        for (int i = 0; i < X_STAGES; ++i) {
            ptx::mbarrier_init(&smem.x_full[i], X_ARRIVALS);
            if (X_FILLED) ptx::mbarrier_init(&smem.x_landed[i], X_BOXES);
        }
        for (int i = 0; i < RAW_STAGES; ++i) {
            if (Y_RAW_BOXES) ptx::mbarrier_init(&smem.y_raw_full[i], 1), ptx::mbarrier_init(&smem.y_raw_empty[i], 128);
            if (X_PLANES > 0) ptx::mbarrier_init(&smem.x_raw_full[i], 1), ptx::mbarrier_init(&smem.x_raw_empty[i], 128);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
}

}  // namespace hc::wgrad
