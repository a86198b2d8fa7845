// What a block of halo_sm80_f64 computes, and bringing its operands to shared memory by cp.async.
#pragma once

#include "families/halo_sm80_f64/layer.cuh"
#include "kernels/divisor.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace hc {

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int TILE_PIXELS = 16 * M_TILES * WARPS_M;
constexpr int BLOCK_EIGHTS = N_TILES * WARPS_N;
constexpr int PIXEL_BYTES = OCTET * 8;                             // in an octet
constexpr int WEIGHT_BYTES = OCTETS * BLOCK_EIGHTS * EIGHT_BYTES;  // of a step
constexpr int COPY_ELEMS = X_COPY ? X_COPY : 1;
constexpr int COPIES = X_COPY ? CHUNK / COPY_ELEMS : 1;  // of a pixel, side by side; the others in a loop

static_assert(X_COPY <= 2, "a copy has at most 16 bytes");
static_assert(MMA_K % OCTET == 0 && CHUNK % MMA_K == 0, "an instruction takes whole octets of a chunk");
static_assert(STAGES >= 2, "a step is staged while another one is multiplied");

struct Params {
    const double* x;
    const double* w;  // as pack.cu writes it
    double* y;
    const double* bias;
    i64 x_n, x_c, x_h, x_w;  // strides in elements: of the gathered tensor, of the output
    i64 y_n, y_k, y_h, y_w;
    i64 pixels;  // of a strip, those of all images
    Extents extents;
    int n, h, width;                // of the gathered tensor
    int channels, filters, groups;  // of a group; groups
    int tiles, strips, filter_tiles, chunks, most_taps;
    int rows, strip_cols;                 // of the largest residue class, of a strip
    Divisor staged_cols, image_rows;      // columns in shared memory; rows there of a whole image
    int reach_rows;                       // rows in shared memory of a row of outputs
    int octet_bytes, x_bytes, x_buffers;  // of a chunk: of an octet, of all; chunks in shared memory
};

// What a block computes.
struct Work {
    Axes axes;
    int group, filter, strip, taps;
    Pixel first;       // image, row of the class and column of the strip
    int pixels;        // of the tile
    int first_rows;    // rows in shared memory of the first image
    int staged;        // pixels there
    int top, left;     // of the first image's first row there, and of all columns, in the gathered image
    int image_top;     // the same of the other images
    int low_h, low_w;  // the least that a tap adds to a pixel's position
    i64 weights;       // steps before those of the block
};

// A tap of a chunk, and where its operands lie.
struct Step {
    int chunk, row, col;  // of the tap, as the axes count
    int x_buffer, w_buffer;
};

// The row in shared memory that the first tap of a pixel reads, if taps move down.
__device__ __forceinline__ int staged_row(const Params& p, const Work& work, Pixel at) {
    const int move = work.axes.vertical.pixel_move, image = at.n - work.first.n;
    if (image == 0) return (at.row - work.first.row) * move;
    return work.first_rows + (image - 1) * p.image_rows.value + at.row * move;
}

__device__ __forceinline__ Work this_work(const Params& p) {
    Work work;
    unsigned index = blockIdx.x;
    const int filter_tile = index % p.filter_tiles;
    index /= p.filter_tiles;
    const int tile = index % p.tiles;
    index /= p.tiles;
    work.strip = index % p.strips, index /= p.strips;
    work.group = index % p.groups;
    const int cls = index / p.groups;
    work.axes = axes_of<DGRAD>(p.extents, cls);
    const Axis &v = work.axes.vertical, &h = work.axes.horizontal;
    work.taps = v.taps * h.taps;
    work.filter = filter_tile * (BLOCK_EIGHTS * 8);
    work.weights = (((i64)cls * p.groups + work.group) * p.filter_tiles + filter_tile) * p.chunks * p.most_taps;
    const i64 before = (i64)tile * TILE_PIXELS;
    work.first = pixel_at(before, p.rows, p.strip_cols);
    work.pixels = p.pixels - before < TILE_PIXELS ? int(p.pixels - before) : TILE_PIXELS;
    work.low_h = lowest(v), work.low_w = lowest(h);
    work.first_rows = (p.rows - 1 - work.first.row) * v.pixel_move + p.reach_rows;
    work.image_top = v.base + work.low_h;
    work.top = work.image_top + work.first.row * v.pixel_move;
    work.left = h.base + work.low_w + work.strip * p.strip_cols * h.pixel_move;
    const Pixel last = pixel_after(work.first, work.pixels - 1, p.rows, p.strip_cols);
    work.staged = (staged_row(p, work, last) + p.reach_rows) * p.staged_cols.value;
    return work;
}

// Pixels from the first tap's to this one's, as taps move down and right from the lowest one.
__device__ __forceinline__ int tap_offset(const Params& p, const Work& work, Step at) {
    const int row = at.row * work.axes.vertical.tap_move - work.low_h;
    return row * p.staged_cols.value + at.col * work.axes.horizontal.tap_move - work.low_w;
}

__device__ __forceinline__ void advance(const Params& p, const Work& work, Step& at) {
    if (++at.w_buffer == STAGES) at.w_buffer = 0;
    if (++at.col < work.axes.horizontal.taps) return;
    at.col = 0;
    if (++at.row < work.axes.vertical.taps) return;
    at.row = 0, ++at.chunk;
    if (++at.x_buffer == p.x_buffers) at.x_buffer = 0;
}

// The pixels that all taps of the tile read, in one chunk of channels.
__device__ __forceinline__ void stage_pixels(const Params& p, const Work& work, int chunk, char* buffer) {
    const int left = p.channels - chunk * CHUNK;
    const i64 first_channel = (i64)work.group * p.channels + chunk * CHUNK;
    for (int i = threadIdx.x; i < work.staged * COPIES; i += THREADS) {
        const int slot = i / COPIES, copy = i % COPIES;
        const int row = p.staged_cols.quotient(slot), behind = row - work.first_rows;
        const int image = behind < 0 ? 0 : p.image_rows.quotient(behind);
        const int h = behind < 0 ? work.top + row : work.image_top + behind - image * p.image_rows.value;
        const int n = work.first.n + (behind < 0 ? 0 : image + 1);
        const int w = work.left + slot - row * p.staged_cols.value;
        const bool inside = (unsigned)h < (unsigned)p.h && (unsigned)w < (unsigned)p.width && n < p.n;
        const double* from = p.x;
        if (inside) from += n * p.x_n + h * p.x_h + w * p.x_w + (first_channel + copy * COPY_ELEMS) * p.x_c;
        char* const to = buffer + slot * PIXEL_BYTES;
#pragma unroll
        for (int c = copy * COPY_ELEMS, end = X_COPY ? c + 1 : CHUNK; c < end; ++c) {
            const bool there = inside && c < left;
            char* const place = to + c / OCTET * p.octet_bytes + c % OCTET * 8;
            if constexpr (COPY_ELEMS == 2)
                ptx::cp_async_16(place, there ? from : p.x, there ? 16 : 0);
            else
                ptx::cp_async_8(place, there ? from : p.x, there ? 8 : 0);
            from += X_COPY ? 0 : p.x_c;
        }
    }
}

// What one more step multiplies. Closes a group of copies.
__device__ __forceinline__ void stage(const Params& p, const Work& work, Step& ahead, char* x_smem, char* w_smem) {
    if (ahead.chunk < p.chunks && work.taps > 0) {
        const int tap = ahead.row * work.axes.horizontal.taps + ahead.col;
        const char* const from =
            reinterpret_cast<const char*>(p.w) + (work.weights + (i64)ahead.chunk * p.most_taps + tap) * WEIGHT_BYTES;
        char* const to = w_smem + ahead.w_buffer * WEIGHT_BYTES;
#pragma unroll 4
        for (int i = threadIdx.x * 16; i < WEIGHT_BYTES; i += THREADS * 16) ptx::cp_async_16(to + i, from + i, 16);
        if (tap == 0) stage_pixels(p, work, ahead.chunk, x_smem + ahead.x_buffer * p.x_bytes);
        advance(p, work, ahead);
    }
    ptx::cp_async_commit_group();
}

}  // namespace hc
