// direct: convolution on CUDA cores for every legal problem, as one matrix product over two gathered operands.
//
//   fprop  y[k, pixel]     = sum over (c, r, s) of w[k, c, r, s] * x[c, pixel at tap]   rows k, columns output pixels
//   dgrad  x[c, pixel]     = sum over (k, r, s) of w[k, c, r, s] * y[k, pixel at tap]   rows c, columns input pixels
//   wgrad  w[k, (c, r, s)] = sum over pixels    of y[k, pixel] * x[c, pixel at tap]     rows k, columns (c, r, s)
//
// The trick: in every direction and layout an operand's element is addressed by one offset of its row or column plus
// one of its reduction index (staging.cuh), so a single kernel serves all three. dgrad of a strided problem runs one
// dense product per residue of the pixel modulo the stride (geometry.cuh): nothing is multiplied by inserted zeros.
//
// Budget: 2 * (TILE_M + TILE_N) * TILE_E sums of shared memory; THREAD_M * THREAD_N sums a thread in registers, moved
// to shared memory each PROMOTE_STAGES stages so that rounding grows with the square root of a short run.
#include "kernels/ceil_div.cuh"
#include "kernels/epilogue.cuh"
#include "kernels/geometry.cuh"
#include "kernels/staging.cuh"

// Constants: DIRECTION is 0 fprop, 1 dgrad, 2 wgrad; ELEM is float, double, hc::fp16 or hc::bf16; all others integers.
//   C_PER_GROUP K_PER_GROUP              channels of one group
//   R S STRIDE_H STRIDE_W DIL_H DIL_W    filter taps; pixels
//   TILE_M TILE_N TILE_E                 rows, columns and reduction indices of a stage
//   THREAD_M THREAD_N MIN_BLOCKS         sums of a thread; blocks per multiprocessor that registers must allow
//   PROMOTE_STAGES                       stages between two promotions, 0 for never
//   CHANNELS_INNER                       1: the channel runs fastest in an index over (channel, tap), 0: the tap column
//   A_E_LANES A_VEC B_VEC                how the operands are staged (staging.cuh)
//   ROWS_CONTIGUOUS                      1: neighbouring rows of the result are neighbours in memory, 0: columns
//   HAS_BIAS                             fprop adds bias[k]
//   SMEM_BYTES                           dynamic shared memory of a launch
#define FPROP 0
#define DGRAD 1
#define WGRAD 2
#define B_E_LANES (CHANNELS_INNER == (DIRECTION != WGRAD))  // lanes are neighbours along the reduction

using hc::Axis;
using hc::Entry;
using hc::i64;
using hc::Pixel;
using elem_t = ELEM;
using acc_t = hc::AccOf<elem_t>::type;

constexpr int THREADS = (TILE_M / THREAD_M) * (TILE_N / THREAD_N);
constexpr int ROWS = DIRECTION == DGRAD ? C_PER_GROUP : K_PER_GROUP;
constexpr int CHANNELS = DIRECTION == DGRAD ? K_PER_GROUP : C_PER_GROUP;  // of the gathered tensor
constexpr bool LANES_ARE_PIXELS = !CHANNELS_INNER;                        // of operand B

static_assert(TILE_M % THREAD_M == 0 && TILE_N % THREAD_N == 0, "a tile is a whole number of thread tiles");
static_assert(THREAD_M % 4 == 0 && THREAD_N % 4 == 0, "a thread reads its operands in groups of four");
static_assert(THREADS % 32 == 0 && THREADS <= 1024, "a block is a whole number of warps");
static_assert(TILE_E % 4 == 0 && TILE_E <= 32, "one warp writes the entries of a stage");

using OperandA = hc::Operand<elem_t, TILE_M, TILE_E, THREADS, A_E_LANES, A_VEC, false>;
using OperandB = hc::Operand<elem_t, TILE_N, TILE_E, THREADS, B_E_LANES, B_VEC, true>;

struct Params {
    elem_t *x, *w, *y;
    const elem_t* bias;
    acc_t* partials;         // wgrad's result: [part][K][C_PER_GROUP][R][S]
    i64 x_n, x_c, x_h, x_w;  // strides in elements
    i64 w_k, w_c, w_r, w_s;
    i64 y_n, y_k, y_p, y_q;
    i64 pixels_per_part;  // wgrad: reduction indices of one block, below 2^30
    int n, h, w_extent, p, q;
    int pad_top, pad_left;
    int tiles_m, tiles_n, groups;
};

struct Smem {
    acc_t a[2][TILE_E][OperandA::PITCH];
    acc_t b[2][TILE_E][OperandB::PITCH];
    Entry rows[TILE_M], cols[TILE_N];
    Entry a_es[2][TILE_E], b_es[2][TILE_E];
    i64 out_cols[TILE_N];  // offset of a column in the result, in elements; -1 outside
    acc_t promoted[PROMOTE_STAGES ? THREAD_M * THREAD_N : 1][PROMOTE_STAGES ? THREADS : 1];
};

static_assert(sizeof(Smem) <= SMEM_BYTES, "the launch asks for enough shared memory");

// Threads of a block, lanes of a warp, warps of a block along the rows (M) and columns (N) of a tile.
constexpr int THREADS_M = TILE_M / THREAD_M, THREADS_N = TILE_N / THREAD_N;
constexpr int LANES_M = THREADS_M < 4 ? THREADS_M : 4, LANES_N = 32 / LANES_M;
constexpr int WARPS_N = THREADS_N / LANES_N;

static_assert(THREADS_M % LANES_M == 0 && THREADS_N % LANES_N == 0, "whole warps tile the block");

// What one block computes. `part` is the residue class in dgrad, the range of pixels in wgrad, 0 in fprop.
struct Work {
    int tile_m, tile_n, group, part;
    Axis vertical, horizontal;
    i64 pixels;    // along the axes, all images
    i64 first_e;   // wgrad: the first pixel of the part
    int es;        // reduction indices of the block
    Pixel origin;  // wgrad: first_e, split
};

__device__ __forceinline__ Work this_work(const Params& p) {
    Work work;
    unsigned index = blockIdx.x;
    work.tile_m = index % p.tiles_m, index /= p.tiles_m;
    work.tile_n = index % p.tiles_n, index /= p.tiles_n;
    work.group = index % p.groups, work.part = index / p.groups;
    if (DIRECTION == DGRAD) {
        const int residues_w = STRIDE_W < p.w_extent ? STRIDE_W : p.w_extent;
        work.vertical = hc::input_axis(R, STRIDE_H, DIL_H, p.pad_top, p.h, work.part / residues_w);
        work.horizontal = hc::input_axis(S, STRIDE_W, DIL_W, p.pad_left, p.w_extent, work.part % residues_w);
    } else {
        work.vertical = hc::output_axis(R, STRIDE_H, DIL_H, p.pad_top, p.p);
        work.horizontal = hc::output_axis(S, STRIDE_W, DIL_W, p.pad_left, p.q);
    }
    work.pixels = (i64)p.n * work.vertical.pixels * work.horizontal.pixels;
    work.first_e = DIRECTION == WGRAD ? work.part * p.pixels_per_part : 0;
    const i64 left = work.pixels - work.first_e;
    work.es = DIRECTION != WGRAD ? CHANNELS * work.vertical.taps * work.horizontal.taps
                                 : int(left < p.pixels_per_part ? left : p.pixels_per_part);
    work.origin = hc::pixel_at(work.first_e, p.p, p.q);
    return work;
}

// ---- Entries: index -> offset and position ----

__device__ __forceinline__ Entry entry(i64 offset_elems, int h = 0, int w = 0) {
    return {offset_elems * (i64)sizeof(elem_t), h, w};
}

struct Tap {
    int channel, row, col;  // row and col count the taps of the axes, not the filter's
};

__device__ __forceinline__ Tap tap_at(const Work& work, int e) {
    const int taps = work.vertical.taps * work.horizontal.taps;
    const int tap = CHANNELS_INNER ? e / CHANNELS : e % taps;
    return {CHANNELS_INNER ? e % CHANNELS : e / taps, tap / work.horizontal.taps, tap % work.horizontal.taps};
}

// The gathered tensor is x in fprop and wgrad, y in dgrad.
__device__ __forceinline__ Entry gathered_tap(const Params& p, const Work& work, Tap tap) {
    const int h = tap.row * work.vertical.tap_move, w = tap.col * work.horizontal.tap_move;
    return DIRECTION == DGRAD ? entry(tap.channel * p.y_k + h * p.y_p + w * p.y_q, h, w)
                              : entry(tap.channel * p.x_c + h * p.x_h + w * p.x_w, h, w);
}

__device__ __forceinline__ Entry gathered_pixel(const Params& p, const Work& work, Pixel at) {
    const int h = work.vertical.base + at.row * work.vertical.pixel_move;
    const int w = work.horizontal.base + at.col * work.horizontal.pixel_move;
    return DIRECTION == DGRAD ? entry(at.n * p.y_n + h * p.y_p + w * p.y_q, h, w)
                              : entry(at.n * p.x_n + h * p.x_h + w * p.x_w, h, w);
}

__device__ __forceinline__ i64 filter_offset(const Params& p, const Work& work, Tap tap) {
    const i64 r = work.vertical.first + tap.row * work.vertical.step;
    const i64 s = work.horizontal.first + tap.col * work.horizontal.step;
    return tap.channel * (DIRECTION == DGRAD ? p.w_k : p.w_c) + r * p.w_r + s * p.w_s;
}

// Where pixel `at` of the axes stands in the result of fprop (y) or dgrad (x), in elements.
__device__ __forceinline__ i64 result_offset(const Params& p, const Work& work, Pixel at) {
    const i64 row = work.vertical.residue + at.row * (i64)work.vertical.spacing;
    const i64 col = work.horizontal.residue + at.col * (i64)work.horizontal.spacing;
    return DIRECTION == DGRAD ? at.n * p.x_n + row * p.x_h + col * p.x_w : at.n * p.y_n + row * p.y_p + col * p.y_q;
}

// What the taps add to a pixel's position.
__device__ __forceinline__ hc::Span tap_span(const Work& work) {
    const int h = (work.vertical.taps - 1) * work.vertical.tap_move,
              w = (work.horizontal.taps - 1) * work.horizontal.tap_move;
    return {h < 0 ? h : 0, h < 0 ? 0 : h, w < 0 ? w : 0, w < 0 ? 0 : w};
}

// Entries of the tile's rows and columns, once per block.
__device__ __forceinline__ void write_tile_entries(Smem& smem, const Params& p, const Work& work) {
    for (int i = threadIdx.x; i < TILE_M; i += THREADS) {
        const int row = work.tile_m * TILE_M + i;
        const i64 stride = DIRECTION == FPROP ? p.w_k : DIRECTION == DGRAD ? p.w_c : p.y_k;
        smem.rows[i] = row < ROWS ? entry(row * stride) : hc::outside();
    }
    for (int j = threadIdx.x; j < TILE_N; j += THREADS) {
        const i64 col = (i64)work.tile_n * TILE_N + j;
        const i64 cols = DIRECTION == WGRAD ? (i64)C_PER_GROUP * R * S : work.pixels;
        Entry from = hc::outside();
        i64 to = -1;
        if (col < cols && DIRECTION == WGRAD) {
            const Tap tap = tap_at(work, (int)col);
            from = gathered_tap(p, work, tap);
            to = (tap.channel * R + tap.row) * S + tap.col;
        } else if (col < cols) {
            const Pixel at = hc::pixel_at(col, work.vertical.pixels, work.horizontal.pixels);
            from = gathered_pixel(p, work, at);
            to = result_offset(p, work, at);
        }
        smem.cols[j] = from;
        smem.out_cols[j] = to;
    }
}

// Entries of one stage's reduction indices: one warp writes those of each operand.
__device__ __forceinline__ void write_stage_entries(Smem& smem, const Params& p, const Work& work, int stage) {
    const int lane = threadIdx.x % 32;
    const int e = stage * TILE_E + lane;
    if (lane >= TILE_E) return;
    for (int operand = threadIdx.x / 32; operand < 2; operand += THREADS / 32) {
        Entry& to = (operand == 0 ? smem.a_es : smem.b_es)[stage % 2][lane];
        if (e >= work.es) {
            to = hc::outside();
        } else if (DIRECTION == WGRAD) {
            const Pixel at = hc::pixel_after(work.origin, e, p.p, p.q);
            to = operand == 0 ? entry(at.n * p.y_n + at.row * p.y_p + at.col * p.y_q) : gathered_pixel(p, work, at);
        } else {
            const Tap tap = tap_at(work, e);
            to = operand == 0 ? entry(filter_offset(p, work, tap)) : gathered_tap(p, work, tap);
        }
    }
}

// ---- Multiply and write ----

using Sums = acc_t[THREAD_M][THREAD_N];

// A thread's place in the tile: groups of four rows and columns; warps are shaped so that operand reads broadcast.
struct Place {
    int m, n;

    __device__ __forceinline__ Place() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        m = (warp / WARPS_N) * LANES_M + lane / LANES_N;
        n = (warp % WARPS_N) * LANES_N + lane % LANES_N;
    }
    __device__ __forceinline__ int row(int group) const { return (group * THREADS_M + m) * 4; }
    __device__ __forceinline__ int col(int group) const { return (group * THREADS_N + n) * 4; }
};

__device__ __forceinline__ void multiply(Sums& sums, const Smem& smem, int slot, Place place) {
    using Pack = hc::Pack4<acc_t>;
#pragma unroll 8
    for (int e = 0; e < TILE_E; ++e) {
        Pack a[THREAD_M / 4], b[THREAD_N / 4];
#pragma unroll
        for (int g = 0; g < THREAD_M / 4; ++g) a[g] = *reinterpret_cast<const Pack*>(&smem.a[slot][e][place.row(g)]);
#pragma unroll
        for (int g = 0; g < THREAD_N / 4; ++g) b[g] = *reinterpret_cast<const Pack*>(&smem.b[slot][e][place.col(g)]);
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) sums[i][j] += a[i / 4].lane[i % 4] * b[j / 4].lane[j % 4];
    }
}

// Adds the sums to the thread's slots in shared memory and clears them; `last` takes the totals back instead.
__device__ __forceinline__ void promote(Sums& sums, Smem& smem, bool first, bool last) {
#pragma unroll
    for (int i = 0; i < THREAD_M * THREAD_N; ++i) {
        acc_t& slot = smem.promoted[PROMOTE_STAGES ? i : 0][threadIdx.x];
        acc_t& sum = sums[i / THREAD_N][i % THREAD_N];
        const acc_t total = first ? sum : slot + sum;
        if (!last) slot = total;
        sum = last ? total : acc_t(0);
    }
}

// Writes sum (+ bias) to out[row * row_stride + column's offset].
template <class T>
__device__ __forceinline__ void write_result(const Sums& sums, const Smem& smem, Place place, int row0, T* out,
                                             i64 row_stride, const elem_t* bias) {
#pragma unroll
    for (int quad = 0; quad < THREAD_M * THREAD_N / 4; ++quad) {
        T* to[4];
        acc_t value[4];
        bool wanted[4];
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            const int i = ROWS_CONTIGUOUS ? quad / THREAD_N * 4 + lane : quad / (THREAD_N / 4);
            const int j = ROWS_CONTIGUOUS ? quad % THREAD_N : quad % (THREAD_N / 4) * 4 + lane;
            const int row = row0 + place.row(i / 4) + i % 4;
            const i64 col_offset = smem.out_cols[place.col(j / 4) + j % 4];
            to[lane] = out + row * row_stride + col_offset;
            wanted[lane] = row < ROWS && col_offset >= 0;
            value[lane] = sums[i][j];
            if (HAS_BIAS && wanted[lane]) value[lane] += hc::to_acc(bias[row]);
        }
        hc::store4(to, value, wanted);
    }
}

// ---- The kernel ----

struct Operands {
    const char *a, *b;  // first element of the group
    int b_h, b_w;       // image extents of the gathered tensor
};

__device__ __forceinline__ Operands operands(const Params& p, int group) {
    const elem_t* x = p.x + group * (C_PER_GROUP * p.x_c);
    const elem_t* w = p.w + group * (K_PER_GROUP * p.w_k);
    const elem_t* y = p.y + group * (K_PER_GROUP * p.y_k);
    const elem_t* a = DIRECTION == WGRAD ? y : w;
    const elem_t* b = DIRECTION == DGRAD ? y : x;
    return {reinterpret_cast<const char*>(a), reinterpret_cast<const char*>(b), DIRECTION == DGRAD ? p.p : p.h,
            DIRECTION == DGRAD ? p.q : p.w_extent};
}

__device__ __forceinline__ void sum_products(Sums& sums, Smem& smem, const Params& p, const Work& work, Place place) {
    const Operands from = operands(p, work.group);
    const int stages = hc::ceil_div(work.es, TILE_E);
    OperandA a;
    OperandB b;
    const hc::Span moves = tap_span(work);
    write_tile_entries(smem, p, work);
    write_stage_entries(smem, p, work, 0);
    __syncthreads();
    a.begin(smem.rows, 1, 1, {});
    b.begin(smem.cols, from.b_h, from.b_w, moves);
    for (int stage = -1; stage < stages; ++stage) {  // stage -1 only fetches: one copy of the code compiles faster
        const int next = stage + 1;
        if (next < stages) {
            const bool whole = (next + 1) * TILE_E <= work.es;
            a.fetch(from.a, smem.rows, smem.a_es[next % 2], 1, 1, {}, false);
            b.fetch(from.b, smem.cols, smem.b_es[next % 2], from.b_h, from.b_w, moves, LANES_ARE_PIXELS && whole);
        }
        write_stage_entries(smem, p, work, next + 1);  // their slot was read one barrier ago
        if (stage >= 0) multiply(sums, smem, stage % 2, place);
        if (next < stages) {
            a.commit(smem.a[next % 2]);
            b.commit(smem.b[next % 2]);
        }
        if (PROMOTE_STAGES && stage >= 0 && next % PROMOTE_STAGES == 0)
            promote(sums, smem, next == PROMOTE_STAGES, false);
        __syncthreads();
    }
    if (PROMOTE_STAGES && stages >= PROMOTE_STAGES) promote(sums, smem, false, true);
}

__device__ __forceinline__ void convolve(const Params& p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
    const Work work = this_work(p);
    if (DIRECTION == DGRAD && (i64)work.tile_n * TILE_N >= work.pixels) return;  // residue classes differ in size
    const Place place;
    Sums sums = {};
    sum_products(sums, smem, p, work, place);
    const int row0 = work.tile_m * TILE_M;
    if (DIRECTION == FPROP) {
        const elem_t* bias = HAS_BIAS ? p.bias + work.group * K_PER_GROUP : nullptr;
        write_result(sums, smem, place, row0, p.y + work.group * (K_PER_GROUP * p.y_k), p.y_k, bias);
    } else if (DIRECTION == DGRAD) {
        write_result(sums, smem, place, row0, p.x + work.group * (C_PER_GROUP * p.x_c), p.x_c, p.bias);
    } else {
        const i64 filter_elems = (i64)C_PER_GROUP * R * S;
        const i64 filters_before = ((i64)work.part * p.groups + work.group) * K_PER_GROUP;
        write_result(sums, smem, place, row0, p.partials + filters_before * filter_elems, filter_elems, p.bias);
    }
}

#if DIRECTION == FPROP
#define ENTRY direct_fprop
#elif DIRECTION == DGRAD
#define ENTRY direct_dgrad
#else
#define ENTRY direct_wgrad
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) ENTRY(const Params p) { convolve(p); }
