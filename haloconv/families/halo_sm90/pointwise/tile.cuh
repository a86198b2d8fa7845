// What a block of halo_sm90_pointwise computes, in which order, and its shared memory.
//
// Pixels come in boxes: BOX_PX places, of which a box of rows and columns of an image fills the first ones. A tile is
// some neighbouring boxes by some neighbouring filters, over a range of the channels (split-K; else over all). Tiles
// that follow one another have the same pixels, as far as there are blocks of filters: so blocks of threads that run
// at a time read them from the L2.
#pragma once

#include "families/halo_sm90/piece.cuh"
#include "families/halo_sm90/pointwise/box_pixels.cuh"
#include "kernels/activation.cuh"
#include "kernels/ceil_div.cuh"
#include "kernels/divisor.cuh"
#include "kernels/numeric.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace hc::pointwise {

using elem_t = ELEM;
using y_elem_t = Y_ELEM;
using bias_t = BiasOf<elem_t, AFFINE>::type;

enum WLoads { W_ROWS, W_COLUMNS, W_PACKED };

constexpr int SIZE = sizeof(elem_t), ROW_BYTES = 128;  // bytes of an element; of a swizzled row
constexpr int CHUNK = ROW_BYTES / SIZE;                // channels of a stage
constexpr int DEPTH = 32 / SIZE, STEPS = 4;            // channels of a wgmma: a step; steps of a stage
constexpr bool X_IN_REGISTERS = SIZE == 4 && !X_INNER, PIXELS_M = Y_INNER || X_IN_REGISTERS;

constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
#ifdef HAS_GAPS
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;  // of those who clear gaps, too
#else
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
#endif
constexpr int BLOCK_M = 64 * M_BLOCKS * (SPLIT_N ? 1 : CONSUMERS), BLOCK_N = COLUMNS * (SPLIT_N ? CONSUMERS : 1);
constexpr int TILE_PX = PIXELS_M ? BLOCK_M : BLOCK_N, TILE_FILTERS = PIXELS_M ? BLOCK_N : BLOCK_M;

// Where pixels are neighbours a box is a row of 128 bytes of them; of x a chunk of channels has as many rows.
constexpr int BOX_PX = SIZE == 4 && !(X_INNER && Y_INNER) ? 32 : 64, BOXES = TILE_PX / BOX_PX;
constexpr int BOX_BYTES = BOX_PX * ROW_BYTES, X_BYTES = BOXES * BOX_BYTES;

// Filters: W_COLUMNS has spans of 64, [span][channel][64 filters]; else [filter][channels].
constexpr int SPAN = 64, SPAN_BYTES = SPAN * ROW_BYTES;
constexpr int SPANS = ceil_div(TILE_FILTERS, SPAN);
constexpr int W_BYTES = W_LOADS == W_ROWS ? TILE_FILTERS * ROW_BYTES : SPANS * SPAN_BYTES;
constexpr int W_BOX_FILTERS = TILE_FILTERS > 256 ? TILE_FILTERS / 2 : TILE_FILTERS;  // W_ROWS: a box has 256 at most

// Sums leave in slabs: 64 rows of M by 128 bytes of N.
constexpr int SLAB = ROW_BYTES / int(sizeof(y_elem_t)), SLABS = COLUMNS / SLAB, SLAB_BYTES = 64 * ROW_BYTES;

constexpr int STAGE_BYTES = X_BYTES + (KEEPS_W ? 0 : W_BYTES);
constexpr int MOST_KEPT = 32;  // chunks of filters that stay

static_assert(TILE_PX % BOX_PX == 0, "a tile is whole boxes");
static_assert(PIXELS_M || COLUMNS % BOX_PX == 0, "a consumer has whole boxes");
static_assert(SIZE == 2 || W_LOADS != W_COLUMNS, "TF32 operands in shared memory are K-major");
static_assert(W_LOADS == W_ROWS || !SPLIT_N || !PIXELS_M || COLUMNS % SPAN == 0,
              "a consumer's filters begin with a span");
static_assert(COLUMNS % SLAB == 0, "sums leave in whole slabs");
static_assert(M_BLOCKS * COLUMNS <= 256, "sums of 128 registers at most");

#ifdef MOMENTS
static_assert(X_INNER && Y_INNER && BOX_PX == 64, "a slab is a box of pixels");

// Of a filter's results in a box: their mean, and the sum of their squared differences from it.
struct alignas(8) Moments {
    float mean, squares;
};
#endif

struct Params {
    TensorMap x_map, w_map, y_map;
#ifdef AFFINE_AND_RESIDUAL
    TensorMap residual_map;  // as y_map
#endif
    const elem_t* x;
    const char* w;  // filters, or what pack.cu made of them
    y_elem_t* y;
    const bias_t* bias;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as y
#endif
#ifdef MOMENTS
    Moments* moments;  // [box][filter]
#endif
#ifdef HAS_GAPS
    char* lines;           // of the result: rows of an image's pixels, or of a plane's, which follow one another
    i64 all_lines;         // of the result
    i64 line_bytes;        // of a line
    int pixel_bytes;       // of a line, from a pixel to the next
    int height, width;     // lines of an image, pixels of a line
    int y_down, y_across;  // every so many lines, and pixels of such a line, an output is met
#endif
#ifdef AFFINE_AND_RESIDUAL
    int residual_bytes;  // that TMA brings for a slab
#endif
#ifdef TAPS
    Divisor image_px, row_px;       // pixels of an image of the result, of a row
    Divisor dil_h, dil_w;           // pixels of x from tap to tap
    int taps_r, taps_s;             // of the filter
    int stride_h, stride_w;         // pixels of x from output to output
    int pad_h, pad_w;               // of x, above and at the left
    int x_rows, x_cols;             // of an image of x
    int all_px;                     // of the result
    int first_tap, tap_step, taps;  // of w: of the first tap, from tap to tap; of all
#endif
#ifdef MOMENTS
    BoxPixels pixels;  // of a box
    int boxes;         // of all images
#endif
#ifdef BY_LANES
    i64 y_image, y_plane, y_part;  // elements from image to image, from filter to filter, from range to range
#endif
    Divisor blocks, splits;    // blocks of filters of the layer; ranges of channels
    Divisor across, down;      // boxes of a row; rows of boxes of an image
    int box_cols, box_rows;    // of a box that is whole
    int box_bytes;             // of x
    int tiles, filters;        // of the layer
    int chunks, range_chunks;  // of all channels, of a range
};

// Where a box begins.
struct Place {
    int column, row, image;

    __device__ __forceinline__ Place(const Params& p, int box) {
        const int line = p.across.quotient(box);
        image = p.down.quotient(line);
        column = (box - line * p.across.value) * p.box_cols, row = (line - image * p.down.value) * p.box_rows;
    }
};

#ifdef TAPS
// Where a pixel of the result is.
struct Pixel {
    int column, row, image;

    __device__ __forceinline__ Pixel(const Params& p, int index) : image(p.image_px.quotient(index)) {
        const int in_image = index - image * p.image_px.value;
        row = p.row_px.quotient(in_image), column = in_image - row * p.row_px.value;
    }
};

// Neighbouring taps of an axis.
struct TapRange {
    int first, count;
};

// The taps that meet one of `extent` pixels if tap 0 is at one of [from, to]; one at least, which may meet zeros alone.
__device__ __forceinline__ TapRange taps_between(int from, int to, const Divisor& dil, int taps, int extent) {
    const int first = min(dil.quotient(max(dil.value - 1 - to, 0)), taps - 1), most = extent - 1 - from;
    const int last = most < 0 ? 0 : min(dil.quotient(most), taps - 1);
    return {first, max(last - first + 1, 1)};
}
#endif

struct Tile {
    int box, filter, split;  // the first box, the first filter, the range of channels
    int first, chunks;       // of the range
#ifdef TAPS
    int column, row, image;  // of the first pixel
    TapRange rows, cols;     // whose products are not zero; `chunks` are those of each of these taps
#endif

    __device__ __forceinline__ Tile(const Params& p, int index) {
        const int rest = p.blocks.quotient(index), pixels = p.splits.quotient(rest);
        box = pixels * BOXES, filter = (index - rest * p.blocks.value) * TILE_FILTERS;
        split = rest - pixels * p.splits.value;
        first = split * p.range_chunks, chunks = min(p.range_chunks, p.chunks - first);
#ifdef CLUSTER
        first = int(ptx::cluster_rank()) * p.range_chunks, chunks = min(p.range_chunks, p.chunks - first);
#endif
#ifdef TAPS
        const Pixel from(p, box * BOX_PX), to(p, min(box * BOX_PX + TILE_PX, p.all_px) - 1);
        const bool one_image = from.image == to.image, one_row = one_image && from.row == to.row;
        const int last_row = p.image_px.value / p.row_px.value - 1, last_column = p.row_px.value - 1;
        column = from.column * p.stride_w - p.pad_w, row = from.row * p.stride_h - p.pad_h, image = from.image;
        rows = taps_between(one_image ? row : -p.pad_h, (one_image ? to.row : last_row) * p.stride_h - p.pad_h, p.dil_h,
                            p.taps_r, p.x_rows);
        cols = taps_between(one_row ? column : -p.pad_w, (one_row ? to.column : last_column) * p.stride_w - p.pad_w,
                            p.dil_w, p.taps_s, p.x_cols);
        chunks *= rows.count * cols.count;
#endif
    }
};

struct Smem {
    char *kept, *stages, *buffers;
    ptx::u64 *full, *empty, *kept_full, *residual_full;  // the last are those of all consumers' buffers

    __device__ __forceinline__ Smem(const Params& p, char* smem) : kept(smem) {
        stages = kept + (KEEPS_W ? p.range_chunks * W_BYTES : 0), buffers = stages + STAGES * STAGE_BYTES;
        full = reinterpret_cast<ptx::u64*>(buffers + CONSUMERS * Y_BUFFERS * SLAB_BYTES), empty = full + STAGES;
        kept_full = empty + STAGES, residual_full = kept_full + (KEEPS_W ? MOST_KEPT : 0);
    }
    __device__ __forceinline__ char* x(int stage) const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ char* w(int stage, int chunk) const {
        return KEEPS_W ? kept + chunk * W_BYTES : x(stage) + X_BYTES;
    }
};

// Places behind the last pixel of a box are multiplied, into sums that are not written: they are zeros. So is what a
// residual would add to them.
__device__ __forceinline__ void clear_places(const Params& p, const Smem& smem) {
    const int rest = (BOX_BYTES - p.box_bytes) / 16;  // of a box, 16 bytes each
    for (int i = threadIdx.x; i < STAGES * BOXES * rest; i += THREADS) {
        const int box = i / rest;
        char* const from = smem.x(box / BOXES) + box % BOXES * BOX_BYTES + p.box_bytes;
        *reinterpret_cast<Piece*>(from + i % rest * 16) = {};
    }
    for (int i = threadIdx.x; RESIDUAL && i < CONSUMERS * Y_BUFFERS * rest; i += THREADS)
        *reinterpret_cast<Piece*>(smem.buffers + i / rest * SLAB_BYTES + p.box_bytes + i % rest * 16) = {};
    ptx::fence_proxy_async_shared();
}

__device__ __forceinline__ void begin(const Params& p, const Smem& smem) {
    if (threadIdx.x == THREADS - 1) {  // while barriers are made
        ptx::prefetch_tensormap(&p.x_map);
        if (W_LOADS != W_PACKED) ptx::prefetch_tensormap(&p.w_map);
#ifndef BY_LANES
        ptx::prefetch_tensormap(&p.y_map);
#endif
#ifdef AFFINE_AND_RESIDUAL
        ptx::prefetch_tensormap(&p.residual_map);
#endif
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(&smem.full[i], 1);
            ptx::mbarrier_init(&smem.empty[i], 4 * CONSUMERS);  // a warp's lane each
        }
        for (int i = 0; KEEPS_W && i < MOST_KEPT; ++i) ptx::mbarrier_init(&smem.kept_full[i], 1);
        for (int i = 0; RESIDUAL && i < CONSUMERS * Y_BUFFERS; ++i) ptx::mbarrier_init(&smem.residual_full[i], 1);
        ptx::fence_mbarrier_init();
    }
    if (X_INNER && Y_INNER && p.box_bytes < BOX_BYTES) clear_places(p, smem);
    __syncthreads();
}

}  // namespace hc::pointwise
