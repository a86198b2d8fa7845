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
// Budget: TILE_I * 8 sums and some 60 more registers; shared memory for the block's planes and their filters, later
// for results that leave together.
#include "families/depthwise_window/windows.cuh"
#include "kernels/epilogue.cuh"

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

// Where registers are full of sums, what says where they go is worked out anew behind the products.
constexpr bool RENEWS = DIRECTION == DGRAD || CHANNELS_INNER;

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "a block is a whole number of warps");
static_assert(TILE_I == 2 || TILE_I == 4 || TILE_I == 8, "rows of a tile divide those of a window row's skew");

struct Params {
    const elem_t *source, *w;  // x in fprop, dy in dgrad
    elem_t* out;
    const elem_t* bias;                          // of fprop, or null
    i64 source_n, source_c, source_h, source_w;  // strides in elements
    i64 w_k, w_r, w_s;
    i64 out_n, out_c, out_h, out_w;
    int n, channels, multiplier;  // images, channels of the result
    int c_groups;                 // blocks that share the channels, where those are neighbours, or 1
    int wave;                     // blocks between those of the same planes and other rows
    int totals_words;             // place of the totals of long sums in shared memory; 0: none
    AxisParams axes[2];
    hc::WindowParams window;
};

// What one block computes: planes from that of image n0 and channel c0 of the result on, results from (row0, col0) of
// a class.
struct Work {
    Line rows, cols;
    int n0, c0, row0, col0;
};

// A plane of the result and the place of its filter among the block's.
struct Plane {
    int image, channel, filter;
    bool exists;
};

// The planes of a block follow one another image by image; where channels are neighbours, channel by channel.
__device__ __forceinline__ Plane plane_at(const Params& p, const Work& work, int index) {
    const int outer = CHANNELS_INNER ? index >> p.window.channel_shift : (work.n0 + index) / p.n;
    const int filter = CHANNELS_INNER ? index - (outer << p.window.channel_shift) : outer;
    const int image = CHANNELS_INNER ? work.n0 + outer : work.n0 + index - outer * p.n;
    return {image, work.c0 + filter, filter, image < p.n && work.c0 + filter < p.channels};
}

__device__ __forceinline__ Line line_of(const AxisParams& p, int index) {
    return DIRECTION == DGRAD ? hc::input_line(p, index) : hc::output_line(p, index);
}

// Neighbours on a multiprocessor, `wave` blocks apart, have other rows: they differ in how many lie in the image.
__device__ __forceinline__ Work work_of(const Params& p, unsigned block) {
    const unsigned tiles = p.axes[0].tiles, all = gridDim.x / tiles, first = block / (p.wave * tiles) * p.wave;
    const unsigned width = all - first < p.wave ? all - first : p.wave, place = block - first * tiles;
    const int tile_h = place / width;
    unsigned index = first + place % width;
    const int class_w = p.window.classes_w == 1 ? index % p.axes[1].classes : 0;
    index /= p.window.classes_w == 1 ? p.axes[1].classes : p.axes[1].classes / p.window.classes_w;
    const int class_h = index % p.axes[0].classes;
    index /= p.axes[0].classes;
    const int tile_w = index % p.axes[1].tiles;
    index /= p.axes[1].tiles;
    const int outer = index / p.c_groups, c_group = index - outer * p.c_groups;
    const i64 plane = (i64)outer * (p.window.planes >> p.window.channel_shift);
    const int channel = CHANNELS_INNER ? c_group << p.window.channel_shift : plane / p.n;
    return {line_of(p.axes[0], class_h),
            line_of(p.axes[1], class_w),
            int(CHANNELS_INNER ? plane : plane - (i64)channel * p.n),
            channel,
            tile_h * p.axes[0].tile,
            tile_w * p.axes[1].tile};
}

// A thread's tile: which plane of the block, and where in the block's results. A warp has the same rows of several
// planes, of which the same lie in the image.
struct Place {
    int plane, row, col, class_w;
    Plane of;
    bool active;

    __device__ __forceinline__ Place(const Params& p, const Work& work, int thread) {
        const int tiles_w = p.axes[1].tile / TILE_J;
        const int all = p.window.planes * p.window.classes_w, line = thread / tiles_w;
        const int tile_h = line / all, classed = line - tile_h * all;
        plane = classed / p.window.classes_w, of = plane_at(p, work, plane);
        col = (thread - line * tiles_w) * TILE_J, row = tile_h * TILE_I;
        class_w = classed - plane * p.window.classes_w;
        active = plane < p.window.planes && row < p.axes[0].tile && of.exists && work.row0 + row < work.rows.results &&
                 work.col0 + col < work.cols.results;
    }
};

// Stages the source and the filters of one term: the m-th filter of each channel (dgrad), a range of taps. Whether all
// taps of the thread are finite.
__device__ __forceinline__ bool stage(float* windows, float* filters, const Params& p, const Work& work,
                                      hc::Origin origin, hc::Stored stored, hc::TapRange range, int m) {
    const auto& window = p.window;
    const auto source_at = [&](int index) -> const elem_t* {
        const Plane plane = plane_at(p, work, index);
        const i64 c = DIRECTION == DGRAD ? (i64)plane.channel * p.multiplier + m : plane.channel / p.multiplier;
        return plane.exists ? p.source + plane.image * p.source_n + c * p.source_c : nullptr;
    };
    const auto filter_at = [&](int filter) -> const elem_t* {
        const i64 k = DIRECTION == DGRAD ? (i64)(work.c0 + filter) * p.multiplier + m : work.c0 + filter;
        return work.c0 + filter < p.channels ? p.w + k * p.w_k : nullptr;
    };
    Line cols = work.cols;  // classes side by side are told apart by columns as residues of a stride are
    if (window.classes_w > 1) cols.stride = window.classes_w, cols.spacing /= window.classes_w;
    hc::stage_windows<TILE_I, THREADS, elem_t>(windows, window, p.axes, work.rows, cols, origin, stored, p.source_h,
                                               p.source_w, source_at);
    return hc::stage_filters<THREADS, elem_t>(filters, window, work.rows, work.cols, range, p.w_r, p.w_s, filter_at);
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
    float* filters = smem + window.planes * window.plane_words;
    const float* own_window = smem + place.plane * window.plane_words + place.class_w * window.class_words +
                              hc::window_col(place.col, window.half_words);
    const int filters_of_plane = DIRECTION == DGRAD ? p.multiplier : 1;
    for (int m = 0; m < filters_of_plane; ++m) {
        for (int row = 0; row < work.rows.taps; row += p.axes[0].chunk) {
            for (int col = 0; col < work.cols.taps; col += p.axes[1].chunk) {
                const hc::TapRange range = hc::tap_range(p.axes, work.rows, work.cols, row, col);
                const hc::Origin origin = {work.rows.position(work.rows.stride * work.row0 + range.row0),
                                           work.cols.position(work.cols.stride * work.col0 + range.col0)};
                const hc::Stored stored = hc::stored_rows(p.axes[0], work.rows, origin.h);
                const hc::Rows met = hc::rows_of_warp(place.active ? hc::rows_met(stored, place.row) : hc::no_rows());
                __syncthreads();  // the term before is read
                const bool finite = stage(smem, filters, p, work, origin, stored, range, m);
                const bool skips = __syncthreads_and(finite);  // a tap that is not finite times zero is no zero
                if (place.active)
                    hc::add_classes<TILE_I>(sums, own_window, filters + place.of.filter * window.filter_words, window,
                                            work.rows, work.cols, range, {0, range.rows}, stored, place.row,
                                            skips ? met : hc::all_rows());
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
    elem_t* plane = p.out + place.of.image * p.out_n + place.of.channel * p.out_c;
    const float bias = bias_of(p, place.of.channel);
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
// A warp takes a row at a time, lanes along channels and columns. They begin where the windows were, and may take more
// room than those: `results_words` in cut.py.
__device__ __forceinline__ void write_together(const Sums& sums, float* smem, const Params& p, const Work& work,
                                               Place place) {
    const auto& window = p.window;
    const int tile_w = p.axes[1].tile * window.classes_w, tile_pixels = p.axes[0].tile * tile_w;
    const int plane_words = tile_pixels + 1;  // one more: channels on other banks

    __syncthreads();  // the windows are read
    if (place.active) {
        float* own =
            smem + place.plane * plane_words + place.row * tile_w + place.col * window.classes_w + place.class_w;
#pragma unroll
        for (int i = 0; i < TILE_I; ++i)
#pragma unroll
            for (int j = 0; j < TILE_J; ++j) own[i * tile_w + j * window.classes_w] = sums[i][j];
    }
    __syncthreads();
    const int step = window.classes_w == 1 ? work.cols.step : 1;
    const int channel = threadIdx.x & ((1 << window.channel_shift) - 1);
    const int first = threadIdx.x % 32 >> window.channel_shift, lanes = 32 >> window.channel_shift;
    const int lines = (window.planes >> window.channel_shift) * p.axes[0].tile;
    for (int line = threadIdx.x / 32; line < lines; line += THREADS / 32) {
        const int group = line / p.axes[0].tile, row = line - group * p.axes[0].tile, a = work.row0 + row;
        const int index = (group << window.channel_shift) + channel;
        const Plane plane = plane_at(p, work, index);
        if (!plane.exists || a >= work.rows.results) continue;
        elem_t* to = p.out + plane.image * p.out_n + plane.channel * p.out_c +
                     (work.rows.first + (i64)a * work.rows.step) * p.out_h;
        const float* from = smem + index * plane_words + row * tile_w;
        const float bias = bias_of(p, plane.channel);
#pragma unroll 1
        for (int i = first; i < tile_w; i += lanes) {
            const int col = work.cols.first + (work.col0 * window.classes_w + i) * step;
            if (col < p.axes[1].results) to[col * p.out_w] = hc::from_acc<elem_t>(from[i] + bias);
        }
    }
}

__device__ __forceinline__ void write(const Sums& sums, float* smem, const Params& p, const Work& work, Place place) {
    if (CHANNELS_INNER || p.window.classes_w > 1)
        write_together(sums, smem, p, work, place);
    else
        write_columns(sums, p, work, place);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_window(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) float dynamic_smem[];
    int block = blockIdx.x, thread = threadIdx.x;
    const Work work = work_of(p, block);
    if (work.row0 >= work.rows.results || work.col0 >= work.cols.results) return;  // classes differ in size
    const Place place(p, work, thread);
    Sums sums = {};
    sum_terms(sums, dynamic_smem, p, work, place);
    if (!RENEWS) return write(sums, dynamic_smem, p, work, place);
    hc::ptx::renew(block), hc::ptx::renew(thread);
    const Work again = work_of(p, block);
    write(sums, dynamic_smem, p, again, Place(p, again, thread));
}
