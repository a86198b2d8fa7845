// depthwise_march_wgrad: the filter gradient of depthwise layers of few taps, as partial sums.
//
//   partials[part][k, r, s] = sum over pixels (n, p, q) of dy[n, k, p, q] * x[n, k / M, row at tap r, column at tap s]
//
// The trick is that of depthwise_march, with sums and weights exchanged: a thread owns COLS neighbouring columns of
// CHANNELS neighbouring filters and marches down a strip of rows with R * S sums in registers. Each x row meets the
// rows of dy in a ring; both are read once, AHEAD steps before they are needed. A thread does several strips (items);
// then a block adds the sums of threads that share filters, in a fixed order, and reduce/partials.cu adds the parts.
//
// Beyond the edges of a strip the ring has zeros. A zero times an infinity is a NaN that does not belong into the sum:
// a thread that finds a sum not finite sums once more, element by element, over the pixels alone.
// Budget: CHANNELS * (R * S + COLS * rows of the ring) registers; CHANNELS * R * S * LANES floats of shared memory.
#include "kernels/geometry.cuh"
#include "families/depthwise/march_axes.cuh"
#include "families/depthwise/march_row.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others are integers.
//   R S STRIDE_H STRIDE_W DIL_W      filter taps; pixels
//   MULTIPLIER                       M: filters of a channel
//   COLS CHANNELS AHEAD              outputs of a thread in a row, filters of a thread; steps that loads are ahead
//   MIN_BLOCKS                       blocks per multiprocessor that registers must allow
//   LANES                            neighbouring lanes that have neighbouring filters, a power of two up to 32
//   IN_VEC IN_LEAD DY_VEC            columns of a vector, columns of the first one before the thread's (march_row.cuh)
//   IN_COL DY_COL                    elements between neighbouring columns in memory, 0: known at run time
#define THREADS 128  // of a block

using hc::i64;
using elem_t = ELEM;

using Axes = hc::march::Columns<false, S, STRIDE_W, DIL_W, COLS, 0>;
using InRow = hc::march::Row<elem_t, Axes::WINDOW, CHANNELS, IN_VEC, IN_LEAD>;
using DyRow = hc::march::Row<elem_t, COLS, CHANNELS, DY_VEC, 0>;

constexpr int RING = (R + STRIDE_H - 1) / STRIDE_H;  // dy rows that meet an x row
constexpr int PERIOD = RING * STRIDE_H;              // x rows after which the ring stands as before
constexpr int SLOTS = THREADS / LANES;               // items side by side in a block
constexpr int TAPS = R * S;

static_assert(MULTIPLIER == 1 || CHANNELS == 1, "filters of one channel belong to one thread each");
static_assert(32 % LANES == 0, "lanes of a warp that share filters are LANES apart");

struct Params {
    const elem_t *x, *dy;
    float* partials;         // [part][K][R][S]
    i64 x_n, x_c, x_h, x_w;  // strides in elements
    i64 y_n, y_k, y_p, y_q;
    i64 x_step_bytes, y_step_bytes;  // from a row to the next one of its class
    i64 items;                       // strips x images x groups of COLS columns
    int n, h, w, p, q;
    int pad_top, pad_left, dil_h;
    int filters, col_groups, strips, strip_rows;  // strips of a class of rows
    int lane_groups, items_per_thread;            // blocks side by side for all filters
};

struct Smem {
    float sums[TAPS * CHANNELS][LANES];
};

using Sums = float[R][S][CHANNELS];

// One strip of COLS columns of an image.
struct Item {
    int image, col, out_row, in_row, rows, steps;
};

__device__ __forceinline__ Item item_at(const Params& p, i64 index) {
    const hc::Pixel at = hc::pixel_at(index, p.n, p.col_groups);
    const int cls = at.n / p.strips, first = at.n % p.strips * p.strip_rows, dil = p.dil_h;
    const int left = hc::ceil_div(p.p - cls, dil) - first;
    const int rows = left < p.strip_rows ? left : p.strip_rows;
    return {at.row,
            at.col * COLS,
            first * dil + cls,
            first * STRIDE_H * dil + cls - p.pad_top,
            rows,
            rows > 0 ? (rows - 1) * STRIDE_H + R : 0};
}

// The items of a thread: neighbouring slots of a block take neighbouring items.
__device__ __forceinline__ i64 item_index(const Params& p, int i) {
    const i64 part = blockIdx.x / (unsigned)p.lane_groups;
    return (part * p.items_per_thread + i) * SLOTS + threadIdx.x / LANES;
}

__device__ __forceinline__ int first_filter(const Params& p) {
    return (int(blockIdx.x % (unsigned)p.lane_groups) * LANES + int(threadIdx.x) % LANES) * CHANNELS;
}

__device__ __forceinline__ const elem_t* x_plane(const Params& p, int image, int filter) {
    return p.x + image * p.x_n + filter / MULTIPLIER * p.x_c;
}

__device__ __forceinline__ const elem_t* dy_plane(const Params& p, int image, int filter) {
    return p.dy + image * p.y_n + filter * p.y_k;
}

// ---- The march ----

using Window = float[Axes::WINDOW][CHANNELS];
using DyWindow = float[COLS][CHANNELS];

__device__ __forceinline__ void multiply(float (&sums)[S][CHANNELS], const DyWindow& dy, const Window& x) {
#pragma unroll
    for (int b = 0; b < COLS; ++b)
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) sums[s][c] += dy[b][c] * x[Axes::place(b, s)][c];
}

struct State {
    const char *x, *dy;  // the next rows to load, at the thread's first column
    i64 x_col_bytes, dy_col_bytes;
    unsigned x_mask, dy_mask;  // vectors that are inside the image
    hc::march::Range x_read, dy_read;
    InRow x_rows[AHEAD];
    DyRow dy_rows[AHEAD];
    DyWindow ring[RING];

    __device__ __forceinline__ State(const Params& p, const Item& item, int filter) : ring{} {
        constexpr i64 BYTES = sizeof(elem_t);
        const int col = Axes::first(item.col, p.pad_left);
        x_col_bytes = (IN_COL ? IN_COL : p.x_w) * BYTES;
        dy_col_bytes = (DY_COL ? DY_COL : p.y_q) * BYTES;
        x = reinterpret_cast<const char*>(x_plane(p, item.image, filter)) + item.in_row * (p.x_h * BYTES) +
            col * x_col_bytes;
        dy = reinterpret_cast<const char*>(dy_plane(p, item.image, filter)) + item.out_row * (p.y_p * BYTES) +
             item.col * dy_col_bytes;
        x_mask = InRow::inside(col, p.w);
        dy_mask = DyRow::inside(item.col, p.q);
        x_read = hc::march::in_image(item.in_row, p.dil_h, p.h, item.steps);
        dy_read = {0, item.steps > 0 ? unsigned(item.steps - R + 1) : 0u};
    }

    // Asks for the rows of step t, at place u of a period. Rows outside the image and beyond the strip are zeros.
    __device__ __forceinline__ void load(const Params& p, int slot, int u, int t) {
        if (u % STRIDE_H < R) x_rows[slot].load(x, x_read.has(t) ? x_mask : 0, x_col_bytes);
        x += p.x_step_bytes;
        if (u % STRIDE_H != 0) return;
        dy_rows[slot].load(dy, dy_read.has(t) ? dy_mask : 0, dy_col_bytes);
        dy += p.y_step_bytes;
    }
};

// Step t, at place u of a period: the x row meets the ring, the rows of AHEAD steps later are asked for.
__device__ __forceinline__ void step(State& state, Sums& sums, const Params& p, int u, int t) {
    Window x;
    state.x_rows[u % AHEAD].unpack(x);
    if (u % STRIDE_H == 0) state.dy_rows[u % AHEAD].unpack(state.ring[u / STRIDE_H]);
#pragma unroll
    for (int i = 0; i < RING; ++i) {
        const int r = i * STRIDE_H + u % STRIDE_H;
        if (r < R) multiply(sums[r], state.ring[(u / STRIDE_H + RING - i) % RING], x);
    }
    state.load(p, u % AHEAD, (u + AHEAD) % PERIOD, t + AHEAD);
}

__device__ __forceinline__ void march(Sums& sums, const Params& p, const Item& item, int filter) {
    State state(p, item, filter);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) state.load(p, i, i % PERIOD, i);
    for (int begin = 0; begin < item.steps; begin += PERIOD) {
#pragma unroll
        for (int u = 0; u < PERIOD; ++u) {
            if (begin + u >= item.steps) return;
            step(state, sums, p, u, begin + u);
        }
        InRow x_moved[AHEAD];  // the rows of place 0 of the next period stand in slot PERIOD % AHEAD
        DyRow dy_moved[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            x_moved[i] = state.x_rows[(i + PERIOD) % AHEAD], dy_moved[i] = state.dy_rows[(i + PERIOD) % AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) state.x_rows[i] = x_moved[i], state.dy_rows[i] = dy_moved[i];
    }
}

// ---- Sums that are not finite ----

__device__ __forceinline__ bool finite(const Sums& sums) {
    float zero = 0;
#pragma unroll
    for (int i = 0; i < TAPS * CHANNELS; ++i) zero += sums[i / CHANNELS / S][i / CHANNELS % S][i % CHANNELS] * 0.f;
    return zero == 0.f;
}

// The sum of one tap over an item, of products that belong into it only.
__device__ __forceinline__ float tap_sum(const Params& p, const Item& item, int filter, int r, int s) {
    float sum = 0;
    const elem_t *x = x_plane(p, item.image, filter), *dy = dy_plane(p, item.image, filter);
    for (int j = 0; j < item.rows; ++j)
        for (int col = item.col; col < item.col + COLS && col < p.q; ++col) {
            const int h = item.in_row + (j * STRIDE_H + r) * p.dil_h, w = col * STRIDE_W + s * DIL_W - p.pad_left;
            const bool inside = (unsigned)h < (unsigned)p.h && (unsigned)w < (unsigned)p.w;
            const i64 row = item.out_row + j * (i64)p.dil_h;
            const float value = inside ? hc::to_acc(x[h * p.x_h + w * p.x_w]) : 0.f;
            sum += hc::to_acc(dy[row * p.y_p + col * p.y_q]) * value;
        }
    return sum;
}

__device__ __forceinline__ void sum_again(Sums& sums, const Params& p, int filter) {
#pragma unroll 1
    for (int k = 0; k < TAPS * CHANNELS; ++k) {
        float sum = 0;
        for (int i = 0; i < p.items_per_thread && item_index(p, i) < p.items; ++i)
            sum += tap_sum(p, item_at(p, item_index(p, i)), filter + k % CHANNELS, k / CHANNELS / S, k / CHANNELS % S);
#pragma unroll
        for (int at = 0; at < TAPS * CHANNELS; ++at)
            if (at == k) sums[at / CHANNELS / S][at / CHANNELS % S][at % CHANNELS] = sum;
    }
}

// ---- Across threads ----

// Adds the sums of threads that share filters: lanes by exchange, then warps one after the other in shared memory.
__device__ __forceinline__ void reduce(Smem& smem, const Sums& sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float all[TAPS * CHANNELS];
#pragma unroll
    for (int i = 0; i < TAPS * CHANNELS; ++i) {
        all[i] = sums[i / CHANNELS / S][i / CHANNELS % S][i % CHANNELS];
#pragma unroll
        for (int far = 16; far >= LANES; far /= 2) all[i] += __shfl_xor_sync(0xffffffffu, all[i], far);
    }
    for (int writer = 0; writer < THREADS / 32; ++writer) {
        if (warp == writer && lane < LANES) {
#pragma unroll
            for (int i = 0; i < TAPS * CHANNELS; ++i)
                smem.sums[i][lane] = writer == 0 ? all[i] : smem.sums[i][lane] + all[i];
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_march_wgrad(const Params p) {
    __shared__ Smem smem;
    const int filter = first_filter(p);
    Sums sums = {};
    if (filter < p.filters) {
        for (int i = 0; i < p.items_per_thread && item_index(p, i) < p.items; ++i)
            march(sums, p, item_at(p, item_index(p, i)), filter);
        if (!finite(sums)) sum_again(sums, p, filter);
    }
    reduce(smem, sums);
    const i64 part = blockIdx.x / (unsigned)p.lane_groups;
    const int first = int(blockIdx.x % (unsigned)p.lane_groups) * LANES * CHANNELS;
    for (int i = threadIdx.x; i < TAPS * CHANNELS * LANES; i += THREADS) {
        const int tap = i % TAPS, at = i / TAPS;  // at: filter of the block
        if (first + at < p.filters)
            p.partials[(part * p.filters + first + at) * TAPS + tap] =
                smem.sums[tap * CHANNELS + at % CHANNELS][at / CHANNELS];
    }
}
