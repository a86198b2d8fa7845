// depthwise_window_wgrad: partial filter gradients of depthwise layers with filters of any size on CUDA cores.
//
//   w[k] at (r, s) = sum over n and pixels (p, q) of y[n, k] at (p, q) * x[n, k / M] at the tap       M = MULTIPLIER
//
// The trick: it is the product of window.cu in other roles. The result is the filter, dy takes the place of the taps,
// stride and dilation change places, and images are summed over. The rows of dy are cut into slices, each with threads
// of its own, which keep TILE_I x 8 sums; those of the slices are added in a fixed order. A block does a part of the
// terms (ranges of dy of an image); sum_partials (reduce/partials.cu) adds the parts.
//
// Budget: TILE_I * 8 sums and some 45 more registers; shared memory for windows of x and as many ranges of dy.
#include "families/depthwise_window/windows.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; the others are integers.
//   TILE_I               rows of a thread's tile
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
using hc::AxisParams;
using hc::i64;
using hc::Line;
using hc::TILE_J;
using elem_t = ELEM;

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "a block is a whole number of warps");
static_assert(TILE_I == 4 || TILE_I == 8, "rows of a tile divide those of a window row's skew");

struct Params {
    const elem_t *x, *y;
    float* partials;                             // [part][K][R][S]
    i64 x_n, x_c, x_h, x_w, y_n, y_k, y_p, y_q;  // strides in elements
    int channels, multiplier, c_groups;          // channels of y
    int row_chunks, col_chunks;                  // ranges of dy
    int terms, part_terms;                       // of all images and ranges; of a part
    int slices, slice_rows;                      // of the rows of a range, in each class of the stride
    AxisParams axes[2];                          // results: the filter; taps: dy; stride and dilation exchanged
    hc::WindowParams window;
};

// What one block computes: channels from c0, filter elements from (row0, col0) of a class, terms [first, end).
struct Work {
    Line rows, cols;
    int c0, row0, col0, part, first, end;
};

__device__ __forceinline__ Work this_work(const Params& p) {
    unsigned index = blockIdx.x;
    const int class_w = index % p.axes[1].classes;
    index /= p.axes[1].classes;
    const int class_h = index % p.axes[0].classes;
    index /= p.axes[0].classes;
    const int tile_w = index % p.axes[1].tiles;
    index /= p.axes[1].tiles;
    const int tile_h = index % p.axes[0].tiles;
    index /= p.axes[0].tiles;
    const int part = index / p.c_groups, first = part * p.part_terms;
    return {hc::output_line(p.axes[0], class_h),
            hc::output_line(p.axes[1], class_w),
            int(index % p.c_groups) * p.window.planes,
            tile_h * p.axes[0].tile,
            tile_w * p.axes[1].tile,
            part,
            first,
            p.terms - first < p.part_terms ? p.terms : first + p.part_terms};
}

// A thread's tile: which channel and slice of the block, and where in the block's results. A warp has the same rows of
// several channels, of which the same lie in the image.
struct Place {
    int channel, slice, row, col;
    bool active;

    __device__ __forceinline__ Place(const Params& p, const Work& work) {
        const int tiles_w = p.axes[1].tile / TILE_J, tiles_h = p.axes[0].tile / TILE_I;
        const int line = threadIdx.x / tiles_w, all = p.window.planes * p.slices * tiles_h;
        const int group = line / p.window.planes;
        channel = line - group * p.window.planes, slice = group / tiles_h;
        col = (threadIdx.x - line * tiles_w) * TILE_J, row = (group - slice * tiles_h) * TILE_I;
        active = line < all && work.c0 + channel < p.channels && work.row0 + row < work.rows.results &&
                 work.col0 + col < work.cols.results;
    }
};

// Stages x and dy of one term. Whether all elements of dy that are the thread's are finite.
__device__ __forceinline__ bool stage(float* windows, float* ranges, const Params& p, const Work& work,
                                      hc::Origin origin, hc::Stored stored, hc::TapRange range, i64 n) {
    const auto x_at = [&](int channel) -> const elem_t* {
        const int k = work.c0 + channel;
        return k < p.channels ? p.x + n * p.x_n + k / p.multiplier * p.x_c : nullptr;
    };
    const auto y_at = [&](int channel) -> const elem_t* {
        const int k = work.c0 + channel;
        return k < p.channels ? p.y + n * p.y_n + k * p.y_k : nullptr;
    };
    hc::stage_windows<TILE_I, THREADS, elem_t>(windows, p.window, p.axes, work.rows, work.cols, origin, stored, p.x_h,
                                               p.x_w, x_at);
    return hc::stage_filters<THREADS, elem_t>(ranges, p.window, work.rows, work.cols, range, p.y_p, p.y_q, y_at);
}

using Sums = float[TILE_I][TILE_J];

__device__ __forceinline__ void sum_terms(Sums& sums, float* smem, const Params& p, const Work& work, Place place) {
    const auto& window = p.window;
    float* ranges = smem + window.planes * window.plane_words;
    const float* own_window = smem + place.channel * window.plane_words + hc::window_col(place.col, window.half_words);
    for (int term = work.first; term < work.end; ++term) {
        const int line = term / p.col_chunks, n = line / p.row_chunks;
        const hc::TapRange range =
            hc::tap_range(p.axes, work.rows, work.cols, (line - n * p.row_chunks) * p.axes[0].chunk,
                          (term - line * p.col_chunks) * p.axes[1].chunk);
        const hc::Origin origin = {work.rows.position(work.rows.stride * work.row0 + range.row0),
                                   work.cols.position(work.cols.stride * work.col0 + range.col0)};
        const hc::Stored stored = hc::stored_rows(p.axes[0], work.rows, origin.h);
        const int slice_row = place.slice * p.slice_rows;
        const hc::Rows met =
            hc::rows_of_warp(place.active ? hc::rows_met(stored, place.row + slice_row) : hc::no_rows());
        __syncthreads();  // the term before is read
        const bool finite = stage(smem, ranges, p, work, origin, stored, range, n);
        const bool skips = __syncthreads_and(finite);  // an element that is not finite times zero is no zero
        if (place.active)
            hc::add_classes<TILE_I>(sums, own_window, ranges + place.channel * window.filter_words, window, work.rows,
                                    work.cols, range, {slice_row, p.slice_rows}, stored, place.row,
                                    skips ? met : hc::all_rows());
    }
}

// Adds the slices of each channel in order, and writes the part's partial result.
__device__ __forceinline__ void write_partials(const Sums& sums, float* smem, const Params& p, const Work& work,
                                               Place place) {
    const int tile_w = p.axes[1].tile, tile_elems = p.axes[0].tile * tile_w;
    __syncthreads();  // the windows are read
    if (place.active) {
        float* own = smem + (place.channel * p.slices + place.slice) * tile_elems + place.row * tile_w + place.col;
#pragma unroll
        for (int i = 0; i < TILE_I; ++i)
#pragma unroll
            for (int j = 0; j < TILE_J; ++j) own[i * tile_w + j] = sums[i][j];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < p.window.planes * tile_elems; at += THREADS) {
        const int channel = at / tile_elems, elem = at - channel * tile_elems, row = elem / tile_w;
        const int a = work.row0 + row, b = work.col0 + elem - row * tile_w, k = work.c0 + channel;
        if (k >= p.channels || a >= work.rows.results || b >= work.cols.results) continue;
        float sum = 0;
        for (int slice = 0; slice < p.slices; ++slice) sum += smem[(channel * p.slices + slice) * tile_elems + elem];
        const i64 filter = ((i64)work.part * p.channels + k) * p.axes[0].results;
        p.partials[(filter + work.rows.first + a * work.rows.step) * p.axes[1].results + work.cols.first +
                   b * work.cols.step] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    depthwise_window_wgrad(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) float dynamic_smem[];
    const Work work = this_work(p);
    if (work.row0 >= work.rows.results || work.col0 >= work.cols.results) return;  // classes differ in size
    const Place place(p, work);
    Sums sums = {};
    sum_terms(sums, dynamic_smem, p, work, place);
    write_partials(sums, dynamic_smem, p, work, place);
}
