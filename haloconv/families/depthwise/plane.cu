// depthwise_plane: fprop and dgrad of depthwise layers on small planes in nchw, whatever a row's alignment.
//
//   fprop: y[n, k, p, q] = sum over (r, s) of w[k, r, s] * x[n, k / M, row at tap r, column at tap s]
//   dgrad: dx[n, c, h, w] = sum over (r, s) of w[c, r, s] * dy[n, c, row that meets h, column that meets w at (r, s)]
//
// The trick: in dense nchw many whole planes are one run of memory, which begins at a multiple of 16 bytes although
// rows and planes do not. A block copies PLANES planes to shared memory in pieces of 16 bytes; a thread computes ROWS
// rows of one plane from rows that it reads whole, with every extent a constant; results stand where the input was, and
// leave as one run. Lanes of a warp have neighbouring planes and the same strip.
//
// Taps outside the plane are no products: an infinity meets no zero of a padding.
// Budget: ROWS * OUT_W + R * S registers and a row of the input; PLANES planes, and their filters in fp32.
#include "families/depthwise/finish.cuh"
#include "families/depthwise/small_planes.cuh"
#include "kernels/divisor.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others are integers.
//   DGRAD                1: the input is dy, and the output dx
//   IN_H IN_W            rows and columns of a plane of the input
//   OUT_H OUT_W          the same of the output
//   R S                  filter taps
//   STEP_H STEP_W        the stride, or minus the dilation: an axis has one of them
//   PAD_TOP PAD_LEFT     padding of the layer
//   ROWS                 rows of the output of a thread
//   PLANES               of the output of a block: its run begins at a multiple of 16 bytes
//   MIN_BLOCKS           blocks per multiprocessor that registers must allow
//   HAS_BIAS             adds bias[k]
//   AFFINE ACTIVATION    of an epilogue, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh), in place of DGRAD and HAS_BIAS
#if EPILOGUE
#define HAS_BIAS (AFFINE == hc::Affine::BIAS)
#endif

using hc::i64;
using elem_t = ELEM;
using namespace hc::planes;

using In = Geometry<elem_t, IN_H, IN_W>;
using Out = Geometry<elem_t, OUT_H, OUT_W>;

constexpr int TAPS = R * S;
constexpr int THREADS = PLANES * STRIPS;  // of a block
constexpr int FILTER_PITCH = TAPS | 1;    // floats from filter to filter in shared memory: odd, for the banks
constexpr int PITCH = In::PITCH > Out::PITCH ? In::PITCH : Out::PITCH;

static_assert(PLANES * Out::PLANE_BYTES % PIECE_BYTES == 0, "runs of the output begin at whole pieces");

struct Params {
    const elem_t *in, *w, *bias;
    elem_t* out;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as out
#endif
    int planes;                                // of the output, of all images
    hc::Divisor filters, w_elems, multiplier;  // filters; elements of all of them; filters of a channel
};

struct Smem {
    alignas(PIECE_BYTES) char planes[PLANES * PITCH];  // of the input, then of the output
    float filters[PLANES * FILTER_PITCH];
};

// The filters of a block's planes to shared memory. They are one run, but for the first one, which follows the last.
__device__ __forceinline__ void load_filters(const Params& p, float* smem, int first_filter, int planes) {
    constexpr int COUNT = (PLANES * TAPS + THREADS - 1) / THREADS, AT_ONCE = 16;
#pragma unroll
    for (int begin = 0; begin < COUNT; begin += AT_ONCE) {
        elem_t tap[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE && begin + i < COUNT; ++i) {
            const int at = threadIdx.x + (begin + i) * THREADS;
            const unsigned in_all = first_filter * TAPS + at;
            if (at < planes * TAPS) tap[i] = p.w[in_all - p.w_elems.quotient(in_all) * p.w_elems.value];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE && begin + i < COUNT; ++i) {
            const int at = threadIdx.x + (begin + i) * THREADS;
            if (at < planes * TAPS) smem[at / TAPS * FILTER_PITCH + at % TAPS] = hc::to_acc(tap[i]);
        }
    }
}

// ---- A thread: a strip of one plane ----

struct Sums {
    float of[ROWS][OUT_W];

    __device__ __forceinline__ void add_up(const char* smem, const float* filter, int plane, int strip, float bias) {
        float w[TAPS];
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) w[tap] = filter[tap];
#pragma unroll
        for (int i = 0; i < ROWS * OUT_W; ++i) of[i / OUT_W][i % OUT_W] = bias;
#pragma unroll
        for (int at = FIRST_ROW; at <= LAST_ROW; ++at) {
            const int in_row = strip * STRIP_STEP + at;
            if (!ONE && (unsigned)in_row >= (unsigned)IN_H) continue;
            float row[IN_W];
            In::read(row, smem, In::row_at(plane, in_row));
            each_product<false>(
                at, strip, [&](int i, int col, int from, int r, int s) { of[i][col] += row[from] * w[r * S + s]; });
        }
    }
    // What becomes of the sums; a residual stands where the output will.
    __device__ __forceinline__ void finish(const Params& p, const char* smem, int filter, int plane, int strip) {
        hc::Finish own;
        own.load(p.bias, filter);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (!has_row(i, strip)) continue;
            float residual[OUT_W] = {};
            if constexpr (RESIDUAL) Out::read(residual, smem, Out::row_at(plane, strip * ROWS + i));
#pragma unroll
            for (int col = 0; col < OUT_W; ++col) of[i][col] = own(of[i][col], residual[col]);
        }
    }
    __device__ __forceinline__ void write(char* smem, int plane, int strip) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (has_row(i, strip)) Out::write(of[i], smem, Out::row_at(plane, strip * ROWS + i));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_plane(const Params p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
    const int first = blockIdx.x * PLANES, planes = min(PLANES, p.planes - first);
    const int first_filter = first - p.filters.quotient(first) * p.filters.value;
    In::ask<PLANES, THREADS>(smem.planes, p.in + (i64)p.multiplier.quotient(first) * (IN_H * IN_W),
                             p.multiplier.quotient(planes));
    hc::ptx::cp_async_commit_group();
    load_filters(p, smem.filters, first_filter, planes);
    hc::ptx::cp_async_wait_group<0>();
    __syncthreads();
    const int plane = threadIdx.x % PLANES, strip = threadIdx.x / PLANES;
    const int filter = first + plane - p.filters.quotient(first + plane) * p.filters.value;
    const bool active = plane < planes;
    Sums sums;
    if (active)
        sums.add_up(smem.planes, smem.filters + plane * FILTER_PITCH, p.multiplier.quotient(plane), strip,
                    HAS_BIAS ? hc::to_acc(p.bias[filter]) : 0.f);
    __syncthreads();  // the input has been read
    const i64 out = (i64)first * (OUT_H * OUT_W);
#ifdef AFFINE_AND_RESIDUAL
    Out::ask<PLANES, THREADS>(smem.planes, p.residual + out, planes);
    hc::ptx::cp_async_commit_group();
    hc::ptx::cp_async_wait_group<0>();
    __syncthreads();
#endif
    if (active) sums.finish(p, smem.planes, filter, plane, strip);
    if (RESIDUAL) __syncthreads();  // a row of halves is read with a neighbour's half
    if (active) sums.write(smem.planes, plane, strip);
    __syncthreads();
    Out::leave<PLANES, THREADS>(p.out + out, smem.planes, planes);
}
