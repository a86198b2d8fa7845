// What a block of halo_sm90_wgrad_ss computes, in which order, and its shared memory.
//
// A tile is some filters, channels and taps. Images are cut into strips of columns, and these into boxes of `box_rows`
// rows of dy. In shared memory a box of dy and the box of x that its taps meet have the same `pitch`, pixels from row
// to row: so the pixel of x that tap (r, s) meets with pixel m of dy is pixel m + r dil_h pitch + s dil_w, for all of
// them. Columns of dy behind the strip's last one, and rows behind the image's, are zeros: a gap, where any pixel of x
// may be. Left of x there is its padding; what is padded on the right is the left padding of the row below.
#pragma once

#include "families/halo_sm90/wgrad_ss/sum.cuh"
#include "kernels/band_walk.cuh"
#include "kernels/ceil_div.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace hc::wgrad_ss {

constexpr int PIXEL_BYTES = 128, SPAN = 64;  // of a span: the channels, or filters, of a swizzled row
constexpr int DEPTH = 16;                    // pixels of a wgmma: a step
constexpr int X_SPANS = ceil_div(BLOCK_CHANNELS, SPAN), Y_SPANS = BLOCK_FILTERS / SPAN;
constexpr int THREADS = 128 * (CONSUMERS + 1), PRODUCER = THREADS / 32 - 1;  // a warp, the last one
constexpr int BEGUN = 1, MULTIPLIED = 2;                                     // named barriers
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160, PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int SUM_BYTES = CLUSTER > 1 ? TILE_SUMS * int(sizeof(float)) : 0;  // of a block, in place of its stages

static_assert(CONSUMERS == 2 || CONSUMERS == 3, "registers are divided among two or three consumers");
static_assert(sizeof(elem_t) == 2, "TF32 operands in shared memory are K-major: their taps cannot be shifted");
static_assert(COLUMNS % SPAN == 0 || SPLIT_C == 1, "a consumer's channels begin with a span");

// How boxes are dealt out, as kernels/band_walk.cuh has it: slabs are tiles, strips those of columns, bands boxes.
struct Cut {
    int slabs, strips, bands, per_block, longer;
};

struct Params {
    TensorMap x_map, y_map;
    const elem_t *x, *dy;
    float* partials;
    elem_t* dw;  // CLUSTER > 1 and one cluster has all parts of a tile, else nullptr
    int taps, taps_s, dil_h, dil_w, pad_top, pad_left;
    int rows;                // of dy
    int pitch, box_rows;     // of boxes, in pixels; of dy in a box
    int strip_cols;          // columns of dy from strip to strip
    int y_column, y_strip;   // what TMA's coordinates of dy move from strip to strip: columns, or strips
    int x_pixels, y_pixels;  // of a span of a stage: whole groups of eight, or whole steps
    int x_filled, y_filled;  // pixels of them that TMA writes
    Blocks blocks;
    Cut cut;
    Result result;
};

// The boxes of a block. Neighbouring blocks are the parts of a cluster's tile; without clusters, parts of other tiles.
struct Boxes : Walk {
    int cluster;  // which of the tile's

    __device__ __forceinline__ explicit Boxes(const Params& p) : Walk(p.cut, blockIdx.x / CLUSTER) {
        cluster = part;
        deal(p.cut, cluster * CLUSTER + (CLUSTER > 1 ? int(ptx::cluster_rank()) : 0));
    }
};

struct Smem {
    char* stages;
    int x_span, y_span, y, stage;  // bytes of a span of x and of dy, from a stage's begin to dy, of a stage
    ptx::u64 *full, *empty;

    __device__ __forceinline__ Smem(const Params& p, char* smem) : stages(smem) {
        x_span = p.x_pixels * PIXEL_BYTES, y_span = p.y_pixels * PIXEL_BYTES;
        y = X_SPANS * x_span, stage = y + Y_SPANS * y_span;
        full = reinterpret_cast<ptx::u64*>(smem + max(STAGES * stage, SUM_BYTES)), empty = full + STAGES;
    }
};

// Pixels behind boxes, which TMA never writes and steps read, are zeros: a warp takes a span of a stage at a time.
__device__ __forceinline__ void clear_behind_boxes(const Params& p, const Smem& smem) {
    constexpr int SPANS = X_SPANS + Y_SPANS;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < STAGES * SPANS; i += PRODUCER) {
        const int span = i % SPANS;
        const bool of_x = span < X_SPANS;
        char* const stage = smem.stages + i / SPANS * smem.stage;
        char* const at = of_x ? stage + span * smem.x_span : stage + smem.y + (span - X_SPANS) * smem.y_span;
        const int filled = of_x ? p.x_filled : p.y_filled, pixels = of_x ? p.x_pixels : p.y_pixels;
        for (int to = filled * PIXEL_BYTES + threadIdx.x % 32 * 16; to < pixels * PIXEL_BYTES; to += 32 * 16)
            *reinterpret_cast<Piece*>(at + to) = {};
    }
    ptx::fence_proxy_async_shared();
}

// The producing warp does not wait for the others: its first boxes come while they clear.
__device__ __forceinline__ void begin(const Params& p, const Smem& smem) {
    if (threadIdx.x / 32 < PRODUCER) {
        clear_behind_boxes(p, smem);
        ptx::bar_sync(BEGUN, THREADS);
        return;
    }
    if (threadIdx.x % 32 == 0) {
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(&smem.full[i], 1);
            ptx::mbarrier_init(&smem.empty[i], 4 * CONSUMERS);  // a warp's lane each
        }
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::bar_arrive(BEGUN, THREADS);
}

// Rows of x from the first tap of the filter to the first one of a tile.
__device__ __forceinline__ int first_row(const Params& p, const Tile& tile) { return tile.tap / p.taps_s * p.dil_h; }

}  // namespace hc::wgrad_ss
