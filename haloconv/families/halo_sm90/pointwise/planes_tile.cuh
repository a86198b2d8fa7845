// What a block of halo_sm90_pointwise_planes computes, in which order, its shared memory, and what fills it.
//
// A tile is some images, or a band of rows of one, by some neighbouring filters. Tiles that follow one another have the
// same pixels, as far as there are blocks of filters: so blocks of threads that run at a time read them from the L2.
#pragma once

#include "families/halo_sm90/piece.cuh"
#include "kernels/activation.cuh"
#include "kernels/ceil_div.cuh"
#include "kernels/divisor.cuh"
#include "kernels/numeric.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace hc::planes {

using elem_t = ELEM;
using bias_t = BiasOf<elem_t, AFFINE>::type;

enum WLoads { W_ROWS, W_COLUMNS, W_PACKED };
enum XPairs { NO_PAIRS, ALL_PAIRS, EVEN_PAIRS };
enum Boxes { NO_BOXES, BOXES_OF_X, BOXES_OF_BOTH };

constexpr int SIZE = sizeof(elem_t);                     // bytes of an element
constexpr int CHUNK = CHUNK_BYTES / SIZE;                // channels of a stage
constexpr int DEPTH = 32 / SIZE, STEPS = CHUNK / DEPTH;  // channels of a wgmma: a step; steps of a stage

constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr int TILE_FILTERS = COLUMNS * (SPLIT_N ? CONSUMERS : 1);

// Filters: W_COLUMNS has spans of 64, [span][channel][64 filters]; else [filter][channels].
constexpr int SPAN = 64, SPAN_BYTES = W_LOADS == W_COLUMNS ? CHUNK * SPAN * SIZE : SPAN * CHUNK_BYTES;
constexpr int SPANS = ceil_div(TILE_FILTERS, SPAN);
constexpr int W_BYTES = W_LOADS == W_ROWS ? TILE_FILTERS * CHUNK_BYTES : SPANS * SPAN_BYTES;
constexpr int W_BOX_FILTERS = TILE_FILTERS > 256 ? TILE_FILTERS / 2 : TILE_FILTERS;  // W_ROWS: a box has 256 at most

constexpr bool X_BOXES = BOXES != NO_BOXES, Y_BOXES = BOXES == BOXES_OF_BOTH;
constexpr bool Y_PAIRS = X_PAIRS == ALL_PAIRS && !HAS_GAPS && Y_PLANE % 4 == 0;  // a lane's rows of M are a word of y
constexpr int BUFFER_SETS = SPLIT_N ? CONSUMERS : 1;          // consumers of rows of M fill a buffer together
constexpr int GROUP_THREADS = 128 * CONSUMERS / BUFFER_SETS;  // that fill a buffer
// Who gives a stage back. To bulk copies each thread for itself: compute-sanitizer's racecheck sees their writes, and
// follows an mbarrier but no __syncwarp before it. To boxes a lane for its warp.
constexpr int READERS = (X_BOXES ? 4 : 128) * CONSUMERS;

static_assert(SIZE == 2 || W_LOADS != W_COLUMNS, "TF32 operands in shared memory are K-major");
static_assert(W_LOADS != W_PACKED || CHUNK_BYTES == 128, "filters are packed in chunks of 128 bytes");
static_assert(W_LOADS == W_ROWS || !SPLIT_N || COLUMNS % SPAN == 0, "a consumer's filters begin with a span");
static_assert(COLUMNS % SLAB == 0 && SLAB % 8 == 0, "sums leave in whole slabs");
static_assert(M_BLOCKS * COLUMNS <= 256, "sums of 128 registers at most");
static_assert(SIZE == 2 || X_PAIRS == NO_PAIRS, "a word has two pixels of 16 bits");
static_assert(Y_BUFFERS >= 2, "a slab is filled while another one leaves");

struct Params {
    TensorMap w_map, x_map, y_map;
    const elem_t* x;
    const char* w;  // filters, or what pack.cu made of them
    elem_t* y;
    const bias_t* bias;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as y
    int y_plane;             // elements of a plane of y
#endif
    i64 x_image, y_image;        // elements from image to image
    Divisor blocks;              // of filters of the layer
    Divisor bands;               // of an image
    Divisor image_rows;          // rows of M from image to image of a tile
    Divisor cols;                // of pixels that are multiplied
    int pixels;                  // of an image of a tile, that are multiplied
    int lane_rows, lanes_rows;   // rows of M from a lane's row to that of the fourth lane behind it, of the sixteenth
    int warp_rows, half_rows;    // from warp to warp, from a lane's first row to its second
    int x_row, x_col;            // elements of a stage from one of these to the next below and to the right
    int y_row, y_col;            // the same of a buffer
    int x_band_col, x_band_row;  // from a band's box of x to the next one's
    int y_band_col, y_band_row;  // the same of y
    int images;                  // of a tile
    int stage_bytes;             // of shared memory
    int tiles, all_images;       // of the layer
    int channels, filters;       // of the layer
    int chunks;                  // of all channels
};

struct Tile {
    int image, band, filter;  // the first ones

    __device__ __forceinline__ Tile(const Params& p, int index) {
        const int pixels = p.blocks.quotient(index), images = p.bands.quotient(pixels);
        image = images * p.images, band = pixels - images * p.bands.value;
        filter = (index - pixels * p.blocks.value) * TILE_FILTERS;
    }
};

// A stage: filters, then the planes of each image. A buffer: those of a slab of filters, of each image.
struct Smem {
    char *stages, *buffers;
    int x_image, y_image, buffer;  // bytes of an image of a stage, of a buffer; of a buffer
    ptx::u64 *full, *empty;

    __device__ __forceinline__ Smem(const Params& p, char* smem)
        : stages(smem),
          buffers(smem + STAGES * p.stage_bytes),
          x_image(CHUNK * X_PLANE),
          y_image(SLAB * Y_PLANE),
          buffer(p.images * y_image),
          full(reinterpret_cast<ptx::u64*>(buffers + BUFFER_SETS * Y_BUFFERS * buffer)),
          empty(full + STAGES) {}
};

__device__ __forceinline__ void begin(const Params& p, const Smem& smem) {
    if (threadIdx.x == THREADS - 1) {  // while barriers are made
        if (W_LOADS != W_PACKED) ptx::prefetch_tensormap(&p.w_map);
        if (X_BOXES) ptx::prefetch_tensormap(&p.x_map);
        if (Y_BOXES) ptx::prefetch_tensormap(&p.y_map);
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(&smem.full[i], 1);
            ptx::mbarrier_init(&smem.empty[i], READERS);
        }
        ptx::fence_mbarrier_init();
    }
    if (HAS_GAPS) {
        for (int i = threadIdx.x; i < BUFFER_SETS * Y_BUFFERS * smem.buffer / 16; i += THREADS)
            reinterpret_cast<Piece*>(smem.buffers)[i] = {};
        ptx::fence_proxy_async_shared();
    }
    __syncthreads();
}

__device__ __forceinline__ void ask_for_w(const Params& p, const Tile& tile, int chunk, char* to, ptx::u64* full) {
    if constexpr (W_LOADS == W_ROWS) {
        for (int i = 0; i < TILE_FILTERS; i += W_BOX_FILTERS)
            ptx::cp_async_bulk_tensor_2d_shared_global(to + i * CHUNK_BYTES, &p.w_map, full, chunk * CHUNK,
                                                       tile.filter + i);
    } else {
        for (int i = 0; i < SPANS; ++i) {
            const int filter = tile.filter + i * SPAN;
            if constexpr (W_LOADS == W_COLUMNS)
                ptx::cp_async_bulk_tensor_2d_shared_global(to + i * SPAN_BYTES, &p.w_map, full, filter, chunk * CHUNK);
            else
                ptx::cp_async_bulk_shared_global(
                    to + i * SPAN_BYTES, p.w + (i64)(filter / SPAN * p.chunks + chunk) * SPAN_BYTES, SPAN_BYTES, full);
        }
    }
}

// Asks for a chunk of an image's planes, from `channel` on, or for a band of them; `bytes` are those of the planes.
__device__ __forceinline__ void ask_for_x(const Params& p, const Tile& tile, int image, int channel, int bytes,
                                          char* to, ptx::u64* full) {
    if constexpr (X_BOXES) {
        ptx::cp_async_bulk_tensor_4d_shared_global(to, &p.x_map, full, tile.band * p.x_band_col,
                                                   tile.band * p.x_band_row, channel, image);
    } else {
        const char* const from = reinterpret_cast<const char*>(p.x + image * p.x_image);
        ptx::cp_async_bulk_shared_global(to, from + (i64)channel * X_PLANE, bytes, full);
    }
}

// Behind the last image of the layer a tile has that one again: what comes of it is not written.
__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    if (W_LOADS == W_PACKED) ptx::griddepcontrol_wait();  // the launch may begin before filters are packed (PDL)
    Cursor at;
    for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        const Tile tile(p, index);
        for (int chunk = 0; chunk < p.chunks; ++chunk, at.advance(STAGES)) {
            const int channel = chunk * CHUNK;
            const int bytes = (X_BOXES ? CHUNK : min(CHUNK, p.channels - channel)) * X_PLANE;
            wait(&smem.empty[at.index], at.parity ^ 1);
            ptx::u64* const full = &smem.full[at.index];
            char* const stage = smem.stages + at.index * p.stage_bytes;
            ptx::mbarrier_arrive_expect_tx(full, W_BYTES + p.images * bytes);
            ask_for_w(p, tile, chunk, stage, full);
#pragma unroll 1
            for (int i = 0; i < p.images; ++i)
                ask_for_x(p, tile, min(tile.image + i, p.all_images - 1), channel, bytes,
                          stage + W_BYTES + i * smem.x_image, full);
        }
    }
}

}  // namespace hc::planes
