// halo_sm80_f64_wgrad: weight gradients in double precision on tensor cores through mma.sync, as partial sums.
//
//   partials[part][filter, channel, tap] = sum over the part's pixels of dy[pixel, filter] * x[pixel at tap, channel]
//
// A fragment's rows are filters, its columns channels, its k output pixels. A block has one row of TAPS taps, and takes
// STEP_PIXELS pixels a step: 16 of a row, or of fewer columns of several rows. It stages dy there and, once for all its
// taps, the pixels of x with their halo: a warp has one tap, which is an offset. Pixels behind the last column are zero
// in dy, and masked in x, which may be infinite there.
//
// Budget: 4 * M_TILES * N_TILES fp64 sums a thread; shared memory for STAGES steps.
#include "kernels/divisor.cuh"
#include "kernels/numeric.cuh"
#include "kernels/products_f64.cuh"
#include "kernels/ptx/cp_async.cuh"

// Constants, all integers:
//   DY_COPY X_COPY     channels of an asynchronous copy; 0: single ones, as neighbours in memory are pixels
//   M_TILES N_TILES    fragments of a warp: 16 filters, 8 channels each
//   WARPS_M WARPS_N    warps of a tap, along filters and channels
//   TAPS               of a block, neighbours in a row of the filter
//   MMA_K              pixels of an instruction
//   STAGES             steps whose operands are in shared memory or on their way
//   MIN_BLOCKS         blocks per multiprocessor that registers must allow
namespace hc {

constexpr int STEP_PIXELS = 16;
constexpr int THREADS = 32 * WARPS_M * WARPS_N * TAPS;
constexpr int FILTERS = 16 * M_TILES * WARPS_M, CHANNELS = 8 * N_TILES * WARPS_N;  // of a block
constexpr int PARTS = MMA_K / 4;                                                   // pixels of a lane, an instruction

// Elements between pixels in shared memory: the four pixels and four channels that half a warp reads lie on all banks.
constexpr int pitch_of(int elems) { return (elems + 15) / 16 * 16 + 4; }
constexpr int DY_PITCH = pitch_of(FILTERS), X_PITCH = pitch_of(CHANNELS);

static_assert(STEP_PIXELS % MMA_K == 0, "instructions take all pixels of a step");
static_assert(THREADS % 16 == 0, "single copies are of 16 pixels side by side");
static_assert(STAGES >= 2, "a step is staged while another one is multiplied");

struct Params {
    const double* x;
    const double* dy;
    double* partials;
    i64 x_n, x_c, x_h, x_w;  // strides in elements
    i64 y_n, y_k, y_p, y_q;
    i64 part_elems;
    int h, width, q;
    int taps_r, taps_s, stride_h, stride_w, dil_h, dil_w, pad_top, pad_left;
    int channels, filters;  // of a group
    int groups, filter_tiles, channel_tiles, tap_tiles;
    int lines;                       // rows of all images of the output
    Divisor rows, strips, x_cols;    // rows of an image; strips of columns; columns of x in shared memory
    int col_bits;                    // a strip has 1 << col_bits columns
    int steps, part_steps, x_slots;  // steps of all parts, of a part at most; pixels of x in shared memory
};

// What a block computes.
struct Work {
    int group, filter, channel, tap_row, tap_col;
    int step, end;
};

// A step's first row, as `lines` counts, and column.
struct Place {
    int line, col;
};

__device__ __forceinline__ Place place_of(const Params& p, int step) {
    const int row_step = p.strips.quotient(step), lines = STEP_PIXELS >> p.col_bits;
    return {row_step * lines, (step - row_step * p.strips.value) << p.col_bits};
}

__device__ __forceinline__ bool is_there(const Params& p, Place at, int line, int col) {
    return at.line + line < p.lines && at.col + col < p.q;
}

// Element (line, column) of dy, of the block's first filter; null where there is none.
__device__ __forceinline__ const double* dy_at(const Params& p, const Work& work, Place at, int pixel) {
    const int line = pixel >> p.col_bits, col = pixel & ((1 << p.col_bits) - 1);
    if (!is_there(p, at, line, col)) return nullptr;
    const int image = p.rows.quotient(at.line + line), row = at.line + line - image * p.rows.value;
    const i64 filter = (i64)work.group * p.filters + work.filter;
    return p.dy + image * p.y_n + row * p.y_p + (at.col + col) * p.y_q + filter * p.y_k;
}

// Element of x for place `slot` in shared memory, of the block's first tap and channel; null where there is none.
__device__ __forceinline__ const double* x_at(const Params& p, const Work& work, Place at, int slot) {
    const int line = p.x_cols.quotient(slot), col = slot - line * p.x_cols.value;
    if (at.line + line >= p.lines) return nullptr;
    const int image = p.rows.quotient(at.line + line), row = at.line + line - image * p.rows.value;
    const int h = row * p.stride_h + work.tap_row * p.dil_h - p.pad_top;
    const int w = at.col * p.stride_w + work.tap_col * p.dil_w - p.pad_left + col;
    if ((unsigned)h >= (unsigned)p.h || (unsigned)w >= (unsigned)p.width) return nullptr;
    const i64 channel = (i64)work.group * p.channels + work.channel;
    return p.x + image * p.x_n + h * p.x_h + w * p.x_w + channel * p.x_c;
}

// Copies COUNT channels, of which `left` exist, of all slots; `from_of(slot)` is the first one's address or null.
template <int COPY, int COUNT, int PITCH, class FromOf>
__device__ __forceinline__ void stage_slots(double* to, int slots, int left, i64 move, const double* any,
                                            const FromOf& from_of) {
    if constexpr (COPY > 0) {
        constexpr int UNITS = COUNT / (COPY ? COPY : 1);
        for (int i = threadIdx.x; i < slots * UNITS; i += THREADS) {
            const int slot = i / UNITS, channel = i % UNITS * COPY;
            const double* const from = from_of(slot);
            const bool there = from != nullptr && channel < left;
            double* const place = to + slot * PITCH + channel;
            if constexpr (COPY == 2)
                ptx::cp_async_16(place, there ? from + channel : any, there ? 16 : 0);
            else
                ptx::cp_async_8(place, there ? from + channel : any, there ? 8 : 0);
        }
    } else {
        for (int slot = threadIdx.x % 16; slot < slots; slot += 16) {
            const double* const from = from_of(slot);
#pragma unroll 4
            for (int channel = threadIdx.x / 16; channel < COUNT; channel += THREADS / 16) {
                const bool there = from != nullptr && channel < left;
                ptx::cp_async_8(to + slot * PITCH + channel, there ? from + channel * move : any, there ? 8 : 0);
            }
        }
    }
}

// Everything that a step multiplies, dy first. Closes a group of copies.
__device__ __forceinline__ void stage(const Params& p, const Work& work, int step, double* buffer) {
    if (step < work.end) {
        const Place at = place_of(p, step);
        stage_slots<DY_COPY, FILTERS, DY_PITCH>(buffer, STEP_PIXELS, p.filters - work.filter, p.y_k, p.dy,
                                                [&](int slot) { return dy_at(p, work, at, slot); });
        stage_slots<X_COPY, CHANNELS, X_PITCH>(buffer + STEP_PIXELS * DY_PITCH, p.x_slots, p.channels - work.channel,
                                               p.x_c, p.x, [&](int slot) { return x_at(p, work, at, slot); });
    }
    ptx::cp_async_commit_group();
}

using Sums = double[M_TILES][N_TILES][4];

// A warp's place in the block, and the lane's in a fragment.
struct Lane {
    int warp_m, warp_n, tap, row, k;
};

__device__ __forceinline__ Lane this_lane() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return {warp % WARPS_M, warp / WARPS_M % WARPS_N, warp / (WARPS_M * WARPS_N), lane / 4, lane % 4};
}

__device__ __forceinline__ void multiply(Sums& sums, const Params& p, const Lane& lane, Place at,
                                         const double* buffer) {
    const double* const dy = buffer + lane.warp_m * (M_TILES * 16) + lane.row;
    const double* const x = buffer + STEP_PIXELS * DY_PITCH + lane.warp_n * (N_TILES * 8) + lane.row;
#pragma unroll
    for (int first = 0; first < STEP_PIXELS; first += MMA_K) {
        double b[N_TILES][PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int pixel = first + part * 4 + lane.k;
            const int line = pixel >> p.col_bits, col = pixel & ((1 << p.col_bits) - 1);
            const bool there = is_there(p, at, line, col);
            const int slot = line * p.x_cols.value + col * p.stride_w + lane.tap * p.dil_w;
#pragma unroll
            for (int j = 0; j < N_TILES; ++j) {
                const double value = x[slot * X_PITCH + j * 8];
                b[j][part] = there ? value : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            double a[2 * PARTS];
#pragma unroll
            for (int e = 0; e < 2 * PARTS; ++e) a[e] = dy[(first + e / 2 * 4 + lane.k) * DY_PITCH + i * 16 + e % 2 * 8];
#pragma unroll
            for (int j = 0; j < N_TILES; ++j) mma_f64<MMA_K>(sums[i][j], a, b[j]);
        }
    }
}

__device__ __forceinline__ void write(const Sums& sums, const Params& p, const Work& work, const Lane& lane, int part) {
    const int tap_col = work.tap_col + lane.tap, taps = p.taps_r * p.taps_s;
    if (tap_col >= p.taps_s) return;
    const int channel = work.channel + lane.warp_n * (N_TILES * 8) + lane.k * 2;
    double* const to = p.partials + part * p.part_elems + work.tap_row * p.taps_s + tap_col;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        const int filter = work.filter + (lane.warp_m * M_TILES + i / 2) * 16 + i % 2 * 8 + lane.row;
        if (filter >= p.filters) continue;
        const i64 before = ((i64)work.group * p.filters + filter) * p.channels;
#pragma unroll
        for (int e = 0; e < N_TILES * 2; ++e) {
            const int c = channel + e / 2 * 8 + e % 2;
            if (c < p.channels) to[(before + c) * taps] = sums[i / 2][e / 2][i % 2 * 2 + e % 2];
        }
    }
}

__device__ __forceinline__ void convolve(const Params& p, double* smem) {
    unsigned index = blockIdx.x;
    Work work;
    work.tap_col = index % p.tap_tiles * TAPS, index /= p.tap_tiles;
    work.tap_row = index % p.taps_r, index /= p.taps_r;
    work.channel = index % p.channel_tiles * CHANNELS, index /= p.channel_tiles;
    work.filter = index % p.filter_tiles * FILTERS, index /= p.filter_tiles;
    work.group = index % p.groups;
    const int part = index / p.groups;
    work.step = part * p.part_steps;
    work.end = work.step + p.part_steps < p.steps ? work.step + p.part_steps : p.steps;
    const int stage_elems = STEP_PIXELS * DY_PITCH + p.x_slots * X_PITCH;
    const Lane lane = this_lane();
    const bool has_tap = work.tap_col + lane.tap < p.taps_s;
    Sums sums = {};
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) stage(p, work, work.step + i, smem + i * stage_elems);
    int buffer = 0;
    for (int step = work.step; step < work.end; ++step) {
        ptx::cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        const int last = buffer == 0 ? STAGES - 1 : buffer - 1;  // read in the step before this one
        stage(p, work, step + STAGES - 1, smem + last * stage_elems);
        if (has_tap) multiply(sums, p, lane, place_of(p, step), smem + buffer * stage_elems);
        buffer = buffer == STAGES - 1 ? 0 : buffer + 1;
    }
    write(sums, p, work, lane, part);
}

}  // namespace hc

extern "C" __global__ void __launch_bounds__(hc::THREADS, MIN_BLOCKS)
    halo_sm80_f64_wgrad(const __grid_constant__ hc::Params p) {
    extern __shared__ __align__(128) double dynamic_smem[];
    hc::convolve(p, dynamic_smem);
}
