// depthwise_march: fprop and dgrad of depthwise layers of few taps, in registers alone.
//
//   fprop  y[n, k, p, q] = sum over (r, s) of w[k, r, s] * x[n, k / M, row at tap r, column at tap s]
//   dgrad  x[n, c, h, w] = sum over (r, s) of w[c, r, s] * y[n, c, row that meets it, column that meets it]   (M = 1)
//
// The trick: a thread owns COLS neighbouring columns of CHANNELS neighbouring channels of the output and marches down a
// strip of rows. Each input row is loaded once, AHEAD rows before it is needed, and multiplied into a ring of sums, one
// for each output row that it meets; then an output row (dgrad: STRIDE_H of them) is complete and leaves. The loop is
// unrolled over a whole period of the ring, so that every sum, weight and word has a register of its own. Neighbouring
// threads read the same halo columns from the L1. In dgrad only taps that meet are multiplied.
//
// A row step is DIL_H rows: rows of one residue modulo the dilation (a class) are marched by themselves.
// Budget: CHANNELS * (R * S + COLS * rows of the ring) registers for weights and sums; the words of each row ahead.
#include "kernels/geometry.cuh"
#include "families/depthwise/finish.cuh"
#include "families/depthwise/march_axes.cuh"
#include "families/depthwise/march_row.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others are integers.
//   DGRAD                            0: fprop, gathers x; 1: dgrad, scatters dy
//   R S STRIDE_H STRIDE_W DIL_W      filter taps; pixels
//   MULTIPLIER                       M: filters of a channel
//   COLS CHANNELS AHEAD              outputs of a thread in a row; input rows under way
//   MIN_BLOCKS                       blocks per multiprocessor that registers must allow
//   PHASE_W                          dgrad: left padding modulo STRIDE_W
//   IN_VEC IN_LEAD OUT_VEC           columns of a vector, columns of the first one before the thread's (march_row.cuh)
//   IN_COL OUT_COL                   elements between neighbouring columns in memory, 0: known at run time
//   CHANNEL_LANES                    1: neighbouring lanes have neighbouring channels, 0: columns
//   HAS_BIAS                         adds bias[k]
//   AFFINE ACTIVATION                of an epilogue, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh), in place of DGRAD,
//                                    PHASE_W and HAS_BIAS
#define THREADS 128  // of a block
#if EPILOGUE         // of fprop
#define DGRAD 0
#define PHASE_W 0
#define HAS_BIAS (AFFINE == hc::Affine::BIAS)
#endif

using hc::i64;
using elem_t = ELEM;

using Axes = hc::march::Columns<DGRAD, S, STRIDE_W, DIL_W, COLS, PHASE_W>;
using InRow = hc::march::Row<elem_t, Axes::WINDOW, CHANNELS, IN_VEC, IN_LEAD>;
using OutRow = hc::march::Row<elem_t, COLS, CHANNELS, OUT_VEC, 0>;

// Rows of the output that an input row meets in fprop, and of the input that an output row meets in dgrad.
constexpr int MET_ROWS = (R + STRIDE_H - 1) / STRIDE_H;
constexpr int RING = DGRAD ? MET_ROWS * STRIDE_H : MET_ROWS;    // rows of sums
constexpr int PERIOD = DGRAD ? MET_ROWS : MET_ROWS * STRIDE_H;  // input rows after which the ring stands as before

static_assert(MULTIPLIER == 1 || (CHANNELS == 1 && !DGRAD), "filters of one channel belong to one thread each");
static_assert(!DGRAD || COLS % STRIDE_W == 0, "threads begin at the same residue modulo the stride");

struct Params {
    const elem_t *in, *w, *bias;
    elem_t* out;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as out
#endif
    i64 in_n, in_c, in_h, in_w;  // strides in elements
    i64 w_k, w_r, w_s;
    i64 out_n, out_c, out_h, out_w;
    i64 in_step_bytes, out_step_bytes;  // from a row to the next one of its class
    i64 threads;                        // of one strip
    int in_rows, in_cols, out_rows, out_cols;
    int pad_top, pad_left, dil_h;
    int channel_groups, col_groups;  // groups of CHANNELS channels and of COLS columns of the output
    int strips, strip_rows;          // of one class; output rows of a strip (dgrad: counted from row -pad_top)
};

using Sums = float[COLS][CHANNELS];

// What a thread works on: the first of its channels and columns of the output, the class of rows, the first row in it.
struct Place {
    int image, channel, col, cls, first;
};

__device__ __forceinline__ Place this_place(const Params& p, unsigned strip, i64 index) {
    const int inner = CHANNEL_LANES ? p.channel_groups : p.col_groups;
    const int outer = CHANNEL_LANES ? p.col_groups : p.channel_groups;
    const hc::Pixel at = hc::pixel_at(index, outer, inner);
    return {at.n, (CHANNEL_LANES ? at.col : at.row) * CHANNELS, (CHANNEL_LANES ? at.row : at.col) * COLS,
            int(strip) / p.strips, int(strip) % p.strips * p.strip_rows};
}

// The rows of a strip. Step t reads row in_row + t * dil_h if that is in the image, which holds for t in `read`. From
// step FIRST_COMPLETE on each step completes DONE rows (fprop with a stride: every STRIDE_H-th step one); those in
// `written`, counted from out_row on, are in the strip and in the image.
struct March {
    int steps, in_row, out_row;
    hc::march::Range read, written;
};

constexpr int FIRST_COMPLETE = DGRAD ? MET_ROWS - 1 : R - 1;
constexpr int DONE = DGRAD ? STRIDE_H : 1;

__device__ __forceinline__ March this_march(const Params& p, const Place& place) {
    March march;
    const int dil = p.dil_h;
    const int above = DGRAD ? p.pad_top - place.cls : -place.cls;  // the class begins so many rows above the image
    const int begin = (DGRAD ? above / dil / STRIDE_H * STRIDE_H : 0) + place.first;
    const int left = hc::ceil_div(p.out_rows + above, dil) - begin;
    const int rows = left < p.strip_rows ? left : p.strip_rows;
    march.out_row = begin * dil - above;
    if (DGRAD) {
        march.in_row = (begin / STRIDE_H - (MET_ROWS - 1)) * dil + place.cls;
        march.steps = rows > 0 ? MET_ROWS - 1 + hc::ceil_div(rows, STRIDE_H) : 0;
    } else {
        march.in_row = begin * STRIDE_H * dil + place.cls - p.pad_top;
        march.steps = rows > 0 ? (rows - 1) * STRIDE_H + R : 0;
    }
    march.read = hc::march::in_image(march.in_row, dil, p.in_rows, march.steps);
    march.written = hc::march::in_image(march.out_row, dil, p.out_rows, rows);
    return march;
}

// Whether an input row at place u of a period meets any output (a stride beyond the filter leaves rows out).
__device__ __forceinline__ constexpr bool is_read(int u) { return DGRAD || u % STRIDE_H < R; }

struct Weights {
    float of[R][S][CHANNELS];

    __device__ __forceinline__ Weights(const Params& p, int channel) {
        const elem_t* from = p.w + channel * p.w_k;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) of[r][s][c] = hc::to_acc(from[c * p.w_k + r * p.w_r + s * p.w_s]);
    }
};

__device__ __forceinline__ void begin_sums(Sums& sums, const float (&bias)[CHANNELS]) {
#pragma unroll
    for (int b = 0; b < COLS; ++b)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) sums[b][c] = bias[c];
}

// Adds one filter row's products with one input row to an output row.
__device__ __forceinline__ void multiply(Sums& sums, const float (&window)[Axes::WINDOW][CHANNELS],
                                         const float (&weights)[S][CHANNELS]) {
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int b = 0; b < COLS; ++b)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                if (Axes::meets(b, s)) sums[b][c] += window[Axes::place(b, s)][c] * weights[s][c];
}

// Multiplies a window of the input row at place u of the period into the output rows that it meets.
__device__ __forceinline__ void multiply_row(Sums (&ring)[RING], const float (&window)[Axes::WINDOW][CHANNELS],
                                             const Weights& weights, int u) {
#pragma unroll
    for (int i = 0; i < MET_ROWS * (DGRAD ? STRIDE_H : 1); ++i) {
        const int r = DGRAD ? i : i * STRIDE_H + u % STRIDE_H;
        if (r < R)
            multiply(ring[DGRAD ? (u * STRIDE_H + i) % RING : (u / STRIDE_H + RING - i) % RING], window, weights.of[r]);
    }
}

// ---- The march ----

// What a thread holds besides its weights.
struct State {
    const char* in;  // the next row to load, and the next one to store, at the thread's first column
    char* out;
    i64 in_col_bytes, out_col_bytes;
    unsigned in_mask, out_mask;  // vectors that are inside the image
    InRow rows[AHEAD];
    Sums ring[RING];
    float bias[CHANNELS];
    hc::Finish finish[CHANNELS];

    __device__ __forceinline__ State(const Params& p, const Place& place, const March& march) : ring{} {
        constexpr i64 BYTES = sizeof(elem_t);
        const int col = Axes::first(place.col, p.pad_left);
        in_col_bytes = (IN_COL ? IN_COL : p.in_w) * BYTES;
        out_col_bytes = (OUT_COL ? OUT_COL : p.out_w) * BYTES;
        in = reinterpret_cast<const char*>(p.in + place.image * p.in_n + place.channel / MULTIPLIER * p.in_c) +
             march.in_row * (p.in_h * BYTES) + col * in_col_bytes;
        out = reinterpret_cast<char*>(p.out + place.image * p.out_n + place.channel * p.out_c) +
              march.out_row * (p.out_h * BYTES) + place.col * out_col_bytes;
        in_mask = InRow::inside(col, p.in_cols);
        out_mask = OutRow::inside(place.col, p.out_cols);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            bias[c] = HAS_BIAS ? hc::to_acc(p.bias[place.channel + c]) : 0.f;
            finish[c].load(p.bias, place.channel + c);
        }
    }

    __device__ __forceinline__ void load(InRow& to, bool inside) { to.load(in, inside ? in_mask : 0, in_col_bytes); }

    __device__ __forceinline__ void store(const Sums& sums, const Params& p, bool wanted) {
        OutRow to;
        if constexpr (EPILOGUE) {
            Sums y = {};
#ifdef AFFINE_AND_RESIDUAL
            to.load(reinterpret_cast<const char*>(p.residual) + (out - reinterpret_cast<const char*>(p.out)),
                    wanted ? out_mask : 0, out_col_bytes);
            to.unpack(y);
#endif
#pragma unroll
            for (int i = 0; i < COLS * CHANNELS; ++i) {
                const int b = i / CHANNELS, c = i % CHANNELS;
                y[b][c] = finish[c](sums[b][c], y[b][c]);
            }
            to.set(y);
        } else {
            to.set(sums);
        }
        if (wanted) to.store(out, out_mask, out_col_bytes);
        out += p.out_step_bytes;
    }
};

// Step t, at place u of a period: the row is multiplied, the row AHEAD steps later is asked for, complete rows leave.
__device__ __forceinline__ void step(State& state, const Params& p, const March& march, const Weights& weights, int u,
                                     int t) {
#pragma unroll
    for (int i = 0; i < DONE; ++i)
        if (DGRAD || u % STRIDE_H == 0)
            begin_sums(state.ring[(DGRAD ? RING - DONE + u * DONE + i : u / STRIDE_H) % RING], state.bias);
    InRow& row = state.rows[u % AHEAD];
    float window[Axes::WINDOW][CHANNELS];
    row.unpack(window);
    if (is_read(u)) multiply_row(state.ring, window, weights, u);
    if (is_read((u + AHEAD) % PERIOD)) state.load(row, march.read.has(t + AHEAD));
    state.in += p.in_step_bytes;
    if (!DGRAD && (u + R * STRIDE_H - (R - 1)) % STRIDE_H != 0) return;
    if (t < FIRST_COMPLETE) return;
#pragma unroll
    for (int i = 0; i < DONE; ++i) {
        const Sums& sums = state.ring[DGRAD ? (u * DONE + i) % RING : (u + R * PERIOD - (R - 1)) / STRIDE_H % RING];
        state.store(sums, p, !DGRAD || march.written.has((t - FIRST_COMPLETE) * DONE + i));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_march(const Params p) {
    const unsigned all_strips = p.strips * p.dil_h;
    const i64 index = (i64)(blockIdx.x / all_strips) * THREADS + threadIdx.x;
    if (index >= p.threads) return;
    const Place place = this_place(p, blockIdx.x % all_strips, index);
    const March march = this_march(p, place);
    State state(p, place, march);
    const Weights weights(p, place.channel);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (is_read(i % PERIOD)) state.load(state.rows[i], march.read.has(i));
        state.in += p.in_step_bytes;
    }
    for (int begin = 0; begin < march.steps; begin += PERIOD) {
#pragma unroll
        for (int u = 0; u < PERIOD; ++u) {
            if (begin + u >= march.steps) return;
            step(state, p, march, weights, u, begin + u);
        }
        InRow moved[AHEAD];  // the row of place 0 of the next period stands in rows[PERIOD % AHEAD]
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) moved[i] = state.rows[(i + PERIOD) % AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) state.rows[i] = moved[i];
    }
}
