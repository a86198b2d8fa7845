// depthwise_window: depthwise convolution (one input channel per group) with filters of any size on CUDA cores.
//
//   fprop  y[n, k] = x[n, k / M] correlated with w[k] (+ bias[k])         M = MULTIPLIER filters per channel
//   dgrad  x[n, c] = sum over m of y[n, c * M + m] correlated with the flipped w[c * M + m]
//
// The trick: planes lie in shared memory with their halo, in fp32, and each thread keeps a tile of TILE_I x 8 sums in
// registers, so that a row of pixels read by 16-byte loads serves TILE_I filter rows and a quad of taps 8 columns
// (depthwise_window/product.cuh). Dilation and the stride of dgrad cut results into classes, each an undilated problem
// (line.cuh); a stride is undone by staging residues side by side (windows.cuh). Extents, filter and cutting are
// numbers of the launch: one kernel serves all layers of a dtype.
//
// Budget: TILE_I * 8 sums and some 45 more registers; shared memory for block_n * block_c planes and block_c filters.
#include "depthwise_window/windows.cuh"
#include "epilogue.cuh"

// Constants: DIRECTION is 0 fprop, 1 dgrad; ELEM is float, hc::fp16 or hc::bf16; the others are integers.
//   TILE_I               rows of a thread's tile
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
//   CHANNELS_INNER       1: channels are neighbours in the result; 0: columns
#define FPROP 0
#define DGRAD 1

using hc::AxisParams;
using hc::i64;
using hc::Line;
using hc::TILE_J;
using elem_t = ELEM;

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "a block is a whole number of warps");
static_assert(TILE_I == 2 || TILE_I == 4 || TILE_I == 8, "rows of a tile divide those of a window row's skew");

struct Params {
    const elem_t *source, *w;  // x in fprop, dy in dgrad
    elem_t* out;
    const elem_t* bias;                          // of fprop, or null
    i64 source_n, source_c, source_h, source_w;  // strides in elements
    i64 w_k, w_r, w_s;
    i64 out_n, out_c, out_h, out_w;
    int n, channels, multiplier, n_groups, c_groups;  // channels of the result; planes of a block are one group
    int totals_words;                                 // place of the totals of long sums in shared memory; 0: none
    AxisParams axes[2];
    hc::WindowParams window;
};

// What one block computes: images from n0 and channels of the result from c0, results from (row0, col0) of a class.
struct Work {
    Line rows, cols;
    int n0, c0, row0, col0;
};

__device__ __forceinline__ Line line_of(const AxisParams& p, int index) {
    return DIRECTION == DGRAD ? hc::input_line(p, index) : hc::output_line(p, index);
}

__device__ __forceinline__ Work this_work(const Params& p) {
    unsigned index = blockIdx.x;
    const int class_w = p.window.classes_w == 1 ? index % p.axes[1].classes : 0;
    index /= p.window.classes_w == 1 ? p.axes[1].classes : p.axes[1].classes / p.window.classes_w;
    const int class_h = index % p.axes[0].classes;
    index /= p.axes[0].classes;
    const int tile_w = index % p.axes[1].tiles;
    index /= p.axes[1].tiles;
    const int tile_h = index % p.axes[0].tiles;
    index /= p.axes[0].tiles;
    const int inner = index % (CHANNELS_INNER ? p.c_groups : p.n_groups);
    const int outer = index / (CHANNELS_INNER ? p.c_groups : p.n_groups);
    return {line_of(p.axes[0], class_h),
            line_of(p.axes[1], class_w),
            (CHANNELS_INNER ? outer : inner) * p.window.block_n,
            (CHANNELS_INNER ? inner : outer) * p.window.block_c,
            tile_h * p.axes[0].tile,
            tile_w * p.axes[1].tile};
}

// A thread's tile: which plane of the block, and where in the block's results.
struct Place {
    int image, channel, row, col, class_w;
    bool active;

    __device__ __forceinline__ Place(const Params& p, const Work& work) {
        const int tiles_w = p.axes[1].tile / TILE_J, tiles_h = p.axes[0].tile / TILE_I;
        const int all = p.window.block_n * p.window.block_c * p.window.classes_w, line = threadIdx.x / tiles_w;
        // Where columns are neighbours, a warp has the same rows of several planes, of which the same lie in the image.
        const int tile_h = CHANNELS_INNER ? line % tiles_h : line / all;
        const int classed = CHANNELS_INNER ? line / tiles_h : line % all, plane = classed / p.window.classes_w;
        col = (threadIdx.x - line * tiles_w) * TILE_J, row = tile_h * TILE_I;
        class_w = classed - plane * p.window.classes_w;
        image = plane / p.window.block_c, channel = plane - image * p.window.block_c;
        active = image < p.window.block_n && row < p.axes[0].tile && work.n0 + image < p.n &&
                 work.c0 + channel < p.channels && work.row0 + row < work.rows.results &&
                 work.col0 + col < work.cols.results;
    }
};

// Stages the source and the filters of one term: the m-th filter of each channel (dgrad), a range of taps. Whether all
// taps of the thread are finite.
__device__ __forceinline__ bool stage(float* windows, float* filters, const Params& p, const Work& work,
                                      hc::TapRange range, int m) {
    const auto& window = p.window;
    const hc::Origin origin = {work.rows.position(work.rows.stride * work.row0 + range.row0),
                               work.cols.position(work.cols.stride * work.col0 + range.col0)};
    const auto plane_at = [&](int plane) -> const elem_t* {
        const int image = plane / window.block_c, channel = work.c0 + plane - image * window.block_c;
        const i64 n = work.n0 + image;
        const i64 c = DIRECTION == DGRAD ? channel * p.multiplier + m : channel / p.multiplier;
        return n < p.n && channel < p.channels ? p.source + n * p.source_n + c * p.source_c : nullptr;
    };
    const auto filter_at = [&](int channel) -> const elem_t* {
        const i64 k = DIRECTION == DGRAD ? (i64)(work.c0 + channel) * p.multiplier + m : work.c0 + channel;
        return work.c0 + channel < p.channels ? p.w + k * p.w_k : nullptr;
    };
    Line cols = work.cols;  // classes side by side are told apart by columns as residues of a stride are
    if (window.classes_w > 1) cols.stride = window.classes_w, cols.spacing /= window.classes_w;
    hc::stage_windows<TILE_I, THREADS, elem_t>(windows, window, p.axes, work.rows, cols, origin, p.source_h, p.source_w,
                                               plane_at);
    return hc::stage_filters<THREADS, elem_t>(filters, window, work.rows, work.cols, range, p.w_r, p.w_s, filter_at);
}

// Rows of a thread's window that lie in the image, or do for another lane of the warp: a loop is the same for all. All
// rows with a stride, and if a tap times zero is no zero.
__device__ __forceinline__ hc::Rows rows_inside(const Params& p, const Work& work, hc::TapRange range, int row,
                                                bool finite) {
    const int spacing = work.rows.spacing, h = work.rows.position(work.row0 + row + range.row0);
    if (work.rows.stride > 1 || !finite) return hc::all_rows();
    int first = h < 0 ? (spacing - 1 - h) / spacing : 0;
    int end = h < p.axes[0].extent ? (p.axes[0].extent - h + spacing - 1) / spacing : 0;
#pragma unroll
    for (int far = 16; far > 0; far /= 2) {
        const int other_first = __shfl_xor_sync(0xffffffffu, first, far);
        const int other_end = __shfl_xor_sync(0xffffffffu, end, far);
        first = other_first < first ? other_first : first, end = other_end > end ? other_end : end;
    }
    return {first, end};
}

using Sums = float[TILE_I][TILE_J];

// Long sums: adds a term's sums to the thread's totals in shared memory and clears them; `last` takes the totals back.
__device__ __forceinline__ void promote(Sums& sums, float* totals, bool first, bool last) {
#pragma unroll
    for (int i = 0; i < TILE_I * TILE_J; ++i) {
        float& slot = totals[i * THREADS + threadIdx.x];
        float& sum = sums[i / TILE_J][i % TILE_J];
        const float total = first ? sum : slot + sum;
        if (!last) slot = total;
        sum = last ? total : 0.0f;
    }
}

__device__ __forceinline__ void sum_terms(Sums& sums, float* smem, const Params& p, const Work& work, Place place) {
    const auto& window = p.window;
    float* filters = smem + window.block_n * window.block_c * window.plane_words;
    const float* own_window = smem + (place.image * window.block_c + place.channel) * window.plane_words +
                              place.class_w * window.class_words + hc::window_row<TILE_I>(window, place.row, 1, 1) +
                              hc::window_col(place.col, window.half_words);
    const int filters_of_plane = DIRECTION == DGRAD ? p.multiplier : 1;
    for (int m = 0; m < filters_of_plane; ++m) {
        for (int row = 0; row < work.rows.taps; row += p.axes[0].chunk) {
            for (int col = 0; col < work.cols.taps; col += p.axes[1].chunk) {
                const hc::TapRange range = hc::tap_range(p.axes, work.rows, work.cols, row, col);
                __syncthreads();  // the term before is read
                const bool finite = stage(smem, filters, p, work, range, m);
                const hc::Rows inside = rows_inside(p, work, range, place.row, __syncthreads_and(finite));
                if (place.active)
                    hc::add_classes<TILE_I>(sums, own_window, filters + place.channel * window.filter_words, window,
                                            work.rows, work.cols, range, {0, range.rows}, inside);
                if (p.totals_words)
                    promote(sums, smem + p.totals_words, m + row + col == 0,
                            m + 1 == filters_of_plane && row + p.axes[0].chunk >= work.rows.taps &&
                                col + p.axes[1].chunk >= work.cols.taps);
            }
        }
    }
}

__device__ __forceinline__ float bias_of(const Params& p, i64 channel) {
    return DIRECTION == FPROP && p.bias ? hc::to_acc(p.bias[channel]) : 0.0f;
}

// Columns are neighbours in memory, or at least not channels: each thread writes its tile.
__device__ __forceinline__ void write_columns(const Sums& sums, const Params& p, const Work& work, Place place) {
    if (!place.active) return;
    const int channel = work.c0 + place.channel;
    elem_t* plane = p.out + (work.n0 + place.image) * p.out_n + channel * p.out_c;
    const float bias = bias_of(p, channel);
#pragma unroll
    for (int i = 0; i < TILE_I; ++i) {
        const int a = work.row0 + place.row + i;
        elem_t* row = plane + (work.rows.first + (i64)a * work.rows.step) * p.out_h;
#pragma unroll
        for (int quad = 0; quad < TILE_J; quad += 4) {
            elem_t* to[4];
            float value[4];
            bool wanted[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int b = work.col0 + place.col + quad + j;
                to[j] = row + (work.cols.first + (i64)b * work.cols.step) * p.out_w;
                value[j] = sums[i][quad + j] + bias;
                wanted[j] = a < work.rows.results && b < work.cols.results;
            }
            hc::store4(to, value, wanted);
        }
    }
}

// Channels are neighbours in memory, or classes of columns: the sums go through shared memory in the order of memory.
__device__ __forceinline__ void write_together(const Sums& sums, float* smem, const Params& p, const Work& work,
                                               Place place) {
    const auto& window = p.window;
    const int tile_w = p.axes[1].tile * window.classes_w, tile_pixels = p.axes[0].tile * tile_w;
    const int plane_words = tile_pixels + 1;  // one more: channels on other banks

    __syncthreads();  // the windows are read
    if (place.active) {
        float* own = smem + (place.image * window.block_c + place.channel) * plane_words + place.row * tile_w +
                     place.col * window.classes_w + place.class_w;
#pragma unroll
        for (int i = 0; i < TILE_I; ++i)
#pragma unroll
            for (int j = 0; j < TILE_J; ++j) own[i * tile_w + j * window.classes_w] = sums[i][j];
    }
    __syncthreads();
    const int step = window.classes_w == 1 ? work.cols.step : 1;
    for (int at = threadIdx.x; at < window.block_n * window.block_c * tile_pixels; at += THREADS) {
        const int outer = at >> window.channel_shift, group = outer / tile_pixels, pixel = outer - group * tile_pixels;
        const int plane = (group << window.channel_shift) + (at & ((1 << window.channel_shift) - 1));
        const int image = plane / window.block_c, row = pixel / tile_w, a = work.row0 + row;
        const i64 n = work.n0 + image, c = work.c0 + plane - image * window.block_c;
        const int col = work.cols.first + (work.col0 * window.classes_w + pixel - row * tile_w) * step;
        if (n >= p.n || c >= p.channels || a >= work.rows.results || col >= p.axes[1].results) continue;
        const float value = smem[plane * plane_words + pixel] + bias_of(p, c);
        p.out[n * p.out_n + c * p.out_c + (work.rows.first + (i64)a * work.rows.step) * p.out_h + col * p.out_w] =
            hc::from_acc<elem_t>(value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_window(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) float dynamic_smem[];
    const Work work = this_work(p);
    if (work.row0 >= work.rows.results || work.col0 >= work.cols.results) return;  // classes differ in size
    const Place place(p, work);
    Sums sums = {};
    sum_terms(sums, dynamic_smem, p, work, place);
    if (CHANNELS_INNER || p.window.classes_w > 1)
        write_together(sums, dynamic_smem, p, work, place);
    else
        write_columns(sums, p, work, place);
}
