// depthwise_plane_wgrad: the filter gradient of depthwise layers on small planes in nchw, as partial sums.
//
//   partials[part][k, r, s] = sum over pixels (n, p, q) of dy[n, k, p, q] * x[n, k / M, row at tap r, column at tap s]
//
// The trick is that of depthwise_plane, with sums and filter exchanged: planes of neighbouring channels of an image are
// one run of memory, which comes in pieces of 16 bytes whatever a row's alignment. A thread has one filter, ROWS rows
// of its dy in registers and a sum for each tap; it meets them with the rows of x, each read whole, with every extent a
// constant. SLOTS images stand side by side, the next ones are on their way. At the end a block adds the sums of
// threads that share a filter, in a fixed order, and reduce/partials.cu adds the parts.
//
// Pixels outside the planes are left out. Where dy is not finite, its products with zeros of the padding are NaN that
// belong into the sums: a thread that finds a sum not finite adds them, element by element.
// Budget: R * S + ROWS * OUT_W registers and a row of x; 2 * SLOTS * PLANES planes of both tensors.
#include "families/depthwise/small_planes.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others are integers.
//   IN_H IN_W            rows and columns of a plane of x
//   OUT_H OUT_W          the same of dy
//   R S                  filter taps
//   STEP_H STEP_W        the stride, or minus the dilation: an axis has one of them
//   PAD_TOP PAD_LEFT     padding of the layer
//   ROWS                 rows of dy of a thread
//   PLANES               filters of a block: the run of an image begins at a multiple of 16 bytes
//   MULTIPLIER           M: filters of a channel
//   SLOTS                images side by side in a block
//   MIN_BLOCKS           blocks per multiprocessor that registers must allow
using hc::i64;
using elem_t = ELEM;
using namespace hc::planes;

using X = Geometry<elem_t, IN_H, IN_W>;
using Dy = Geometry<elem_t, OUT_H, OUT_W>;

constexpr int TAPS = R * S;
constexpr int IMAGE_THREADS = PLANES * STRIPS, THREADS = IMAGE_THREADS * SLOTS;  // of a block
constexpr int SUM_PITCH = THREADS | 1;  // floats from tap to tap in shared memory: odd, for the banks

static_assert(PLANES % MULTIPLIER == 0, "filters of one channel are in one block");
static_assert(PLANES / MULTIPLIER * X::PLANE_BYTES % PIECE_BYTES == 0, "runs of x begin at whole pieces");
static_assert(PLANES * Dy::PLANE_BYTES % PIECE_BYTES == 0, "runs of dy begin at whole pieces");

// Whether each output pixel of an axis meets some input pixel at some tap, not the padding alone.
__device__ __forceinline__ constexpr bool all_meet(int outs, int ins, int taps, int stride, int dil, int pad) {
    for (int out = 0; out < outs; ++out) {
        bool meets = false;
        for (int in = 0; in < ins; ++in) meets = meets || tap_of(out, in, taps, stride, dil, pad) >= 0;
        if (!meets) return false;
    }
    return true;
}

// Then what is not finite in dy shows in some sum.
constexpr bool SHOWS =
    all_meet(OUT_H, IN_H, R, STRIDE_H, DIL_H, PAD_TOP) && all_meet(OUT_W, IN_W, S, STRIDE_W, DIL_W, PAD_LEFT);

struct Params {
    const elem_t *x, *dy;
    float* partials;        // [part][K][R][S]
    i64 x_image, dy_image;  // elements from image to image
    int images, filters;
    int groups, part_images;  // blocks side by side for all filters; images of a part
};

struct Stage {
    alignas(PIECE_BYTES) char x[SLOTS][PLANES / MULTIPLIER * X::PITCH];
    alignas(PIECE_BYTES) char dy[SLOTS][PLANES * Dy::PITCH];
};

union Smem {
    Stage stage[2];  // one that is multiplied, one that is on its way
    float sums[TAPS * SUM_PITCH];
};

// What a block does: filters from the first one on, and images [begin, end).
struct Work {
    int filter, planes, begin, end;

    __device__ __forceinline__ explicit Work(const Params& p)
        : filter(int(blockIdx.x % (unsigned)p.groups) * PLANES),
          planes(min(PLANES, p.filters - filter)),
          begin(int(blockIdx.x / (unsigned)p.groups) * p.part_images),
          end(min(begin + p.part_images, p.images)) {}
};

// Asks for the planes of SLOTS images, of those that there are.
__device__ __forceinline__ void ask(const Params& p, const Work& work, Stage& stage, int image) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        if (image + slot >= work.end) break;
        X::ask<PLANES / MULTIPLIER, THREADS>(
            stage.x[slot], p.x + (image + slot) * p.x_image + (i64)(work.filter / MULTIPLIER) * (IN_H * IN_W),
            work.planes / MULTIPLIER);
        Dy::ask<PLANES, THREADS>(stage.dy[slot],
                                 p.dy + (image + slot) * p.dy_image + (i64)work.filter * (OUT_H * OUT_W), work.planes);
    }
    hc::ptx::cp_async_commit_group();
}

struct Sums {
    float of[TAPS] = {};
    float hidden = 0;  // without SHOWS: not 0 if something in dy is not finite

    __device__ __forceinline__ bool finite() const {
        float zero = hidden * 0.f;
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) zero += of[tap] * 0.f;
        return zero == 0.f;
    }
    // A strip of one plane of dy with what it meets of x.
    __device__ __forceinline__ void add(const char* x, const char* dy, int plane, int strip) {
        float rows[ROWS][OUT_W];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (has_row(i, strip)) Dy::read(rows[i], dy, Dy::row_at(plane, strip * ROWS + i));
#pragma unroll
        for (int i = 0; i < (SHOWS ? 0 : ROWS * OUT_W); ++i)
            if (has_row(i / OUT_W, strip)) hidden += rows[i / OUT_W][i % OUT_W] * 0.f;
#pragma unroll
        for (int at = FIRST_ROW; at <= LAST_ROW; ++at) {
            const int x_row = strip * STRIP_STEP + at;
            if (!ONE && (unsigned)x_row >= (unsigned)IN_H) continue;
            float row[IN_W];
            X::read(row, x, X::row_at(plane / MULTIPLIER, x_row));
            each_product<true>(
                at, strip, [&](int i, int col, int from, int r, int s) { of[r * S + s] += rows[i][col] * row[from]; });
        }
    }
};

// A tap's products of one strip of dy with the padding: zeros, or NaN.
__device__ __forceinline__ float with_padding(const elem_t* dy, int strip, int r, int s) {
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < ROWS && has_row(i, strip); ++i)
#pragma unroll 1
        for (int col = 0; col < OUT_W; ++col) {
            const int row = strip * ROWS + i;
            const int h = row * STRIDE_H + r * DIL_H - PAD_TOP, w = col * STRIDE_W + s * DIL_W - PAD_LEFT;
            const bool inside = (unsigned)h < (unsigned)IN_H && (unsigned)w < (unsigned)IN_W;
            if (!inside) sum += hc::to_acc(dy[row * OUT_W + col]) * 0.f;
        }
    return sum;
}

// The same of all images that a thread has; `dy` is its plane of the first one.
__device__ __forceinline__ void add_padding(const Params& p, Sums& sums, const elem_t* dy, int images, int strip) {
#pragma unroll 1
    for (int tap = 0; tap < TAPS; ++tap) {
        float sum = 0;
#pragma unroll 1
        for (int i = 0; i < images; i += SLOTS) sum += with_padding(dy + i * p.dy_image, strip, tap / S, tap % S);
#pragma unroll
        for (int at = 0; at < TAPS; ++at)
            if (at == tap) sums.of[at] += sum;
    }
}

// Adds the sums of threads that share a filter, strip after strip and image after image, and writes them.
__device__ __forceinline__ void add_up(const Params& p, const Work& work, float* all, const Sums& sums) {
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) all[tap * SUM_PITCH + threadIdx.x] = sums.of[tap];
    __syncthreads();
    float* const to = p.partials + ((i64)(blockIdx.x / (unsigned)p.groups) * p.filters + work.filter) * TAPS;
    for (int i = threadIdx.x; i < work.planes * TAPS; i += THREADS) {
        float sum = 0;
#pragma unroll
        for (int part = 0; part < STRIPS * SLOTS; ++part) sum += all[i % TAPS * SUM_PITCH + part * PLANES + i / TAPS];
        to[i] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_plane_wgrad(const Params p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
    const Work work(p);
    const int plane = threadIdx.x % PLANES, strip = threadIdx.x / PLANES % STRIPS, slot = threadIdx.x / IMAGE_THREADS;
    Sums sums;
    ask(p, work, smem.stage[0], work.begin);
    int now = 0;
#pragma unroll 1
    for (int image = work.begin; image < work.end; image += SLOTS, now ^= 1) {
        ask(p, work, smem.stage[now ^ 1], image + SLOTS);
        hc::ptx::cp_async_wait_group<1>();
        __syncthreads();
        const Stage& stage = smem.stage[now];
        if (plane < work.planes && image + slot < work.end) sums.add(stage.x[slot], stage.dy[slot], plane, strip);
        __syncthreads();  // the images have been read
    }
    if (plane < work.planes && !sums.finite())
        add_padding(p, sums, p.dy + (work.begin + slot) * p.dy_image + (i64)(work.filter + plane) * (OUT_H * OUT_W),
                    work.end - work.begin - slot, strip);
    add_up(p, work, smem.sums, sums);
}
