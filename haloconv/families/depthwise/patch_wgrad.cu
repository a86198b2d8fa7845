// depthwise_patch_wgrad: the filter gradient of depthwise layers in 16 bits on Hopper's tensor cores, as partial sums.
//
//   partials[part][k, r, s] = sum over pixels (n, p, q) of dy[n, k, p, q] * x[n, k / M, row at tap r, column at tap s]
//
// The 64 pixels of dy of a patch of 8 x 8 are the rows of a wgmma, the elements of its window of x the columns, and k
// walks over patches: d[(a, b), (t, u)] = sum over patches (i, j) of dy[8 i + a, 8 j + b] * x[8 i + t, 8 j + u]. What
// belongs to tap (r, s) is t - a = r, u - b = s. The trick: all planes of a filter go into the same sums, and wgmma
// finds both operands as rows lie in shared memory, where windows overlap like in the plane.
//
// Planes have zeros around. A zero times an infinity is a NaN that does not belong into the sum: a tap whose sum is not
// finite is summed once more, over the pixels alone.
// Budget: PIECES * COLUMNS / 2 registers for sums; BUFFERS strips of both planes as they land, one
// padded.
#include "families/depthwise/patches.cuh"
#include "families/depthwise/plane_sum.cuh"
#include "kernels/numeric.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others are integers.
//   R S DIL_H DIL_W      filter taps; pixels
//   MULTIPLIER           M: filters of a channel
//   SHIFT                left padding modulo 8 columns
//   BUFFERS              strips under way, the one that is multiplied included
//   MIN_BLOCKS           blocks per multiprocessor that registers must allow
using hc::i64;
using elem_t = ELEM;
using hc::ptx::u32;
using hc::ptx::u64;
using namespace hc::patches;

constexpr int HEIGHT = (EDGE + (R - 1) * DIL_H + 1) / 2 * 2;        // of a window
constexpr int PIECES = (EDGE + (S - 1) * DIL_W + EDGE - 1) / EDGE;  // of 8 columns, in a row of a window
constexpr int COLUMNS = EDGE * HEIGHT;                              // of a product: one piece of all rows
constexpr int STEP_ROWS = 2 * EDGE;  // of dy: 16 patches are the k of a product, eight in a row
constexpr int WARPS = THREADS / 32;

static_assert(sizeof(elem_t) == 2, "patches are of 16-bit elements");
static_assert(SHIFT >= 0 && SHIFT < EDGE, "the left padding modulo a piece");

struct Params {
    const elem_t *x, *dy;
    float* partials;  // [part][K][R][S]
    Side x_side, dy_side;
    Cut cut;
    int channels, parts;
    int x_landing_bytes, landing_bytes;  // of x, which dy follows, and of a buffer
    int x_padded_bytes, padded_bytes;    // the same
    int dy_rows, pad_left;               // of dy that are multiplied, a multiple of STEP_ROWS; padding
};

// Sums over the rows of a patch, for each warp, row of taps, column of a patch and column of a window.
struct Smem {
    float sums[WARPS][R][EDGE][EDGE * PIECES + 1];
};

// Sums d of piece i, as a thread has them: row 8 * (2 * warp + j) + lane / 4, column 8 * t + 2 * (lane % 4) + e.
using Sums = float[PIECES][COLUMNS / 2];

__device__ __forceinline__ void multiply(Sums& sums, const Params& p, const char* x, const char* dy) {
    const u64 left =
        hc::ptx::smem_descriptor(hc::ptx::shared_address(dy), EDGE * p.dy_side.row_bytes, p.dy_side.row_bytes, 0);
    const u64 right =
        hc::ptx::smem_descriptor(hc::ptx::shared_address(x), EDGE * p.x_side.row_bytes, p.x_side.row_bytes, 0);
    hc::ptx::wgmma_fence();
    for (int row = 0; row < p.dy_rows; row += STEP_ROWS)
        for (int col = 0; col < p.dy_side.row_bytes / PIECE_BYTES; col += 8)
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                hc::ptx::wgmma_ss<elem_t, COLUMNS, true, true>(
                    sums[i], hc::ptx::moved(left, row * (p.dy_side.row_bytes / PIECE_BYTES) + col),
                    hc::ptx::moved(right, row * (p.x_side.row_bytes / PIECE_BYTES) + col + i), true);
    hc::ptx::wgmma_commit_group();
    hc::ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < PIECES; ++i) hc::ptx::wgmma_hold(sums[i]);
}

// ---- The sums of a filter ----

// A lane's part of one tap's sum over units [first, end), of products that belong into it only.
__device__ __forceinline__ float sum_again(const Params& p, int first, int end, int r, int s) {
    float sum = 0;
    for (Unit unit = unit_at(p.cut, first); first < end; ++first, unit.advance(p.cut)) {
        const elem_t* x =
            p.x + unit.image * p.x_side.planes.image + unit.channel / MULTIPLIER * p.x_side.planes.channel;
        const elem_t* dy = p.dy + unit.image * p.dy_side.planes.image + unit.channel * p.dy_side.planes.channel;
        const int begin = unit.strip * p.cut.rows, w = p.x_side.planes.width * EDGE, q = p.dy_side.planes.width * EDGE;
        sum += hc::plane_sum<elem_t>({x, w, p.x_side.planes.extent, w}, {dy, q, p.dy_side.planes.extent, q}, begin,
                                     begin + p.cut.rows, r * DIL_H - p.x_side.planes.pad_top, s * DIL_W - p.pad_left);
    }
    return sum;
}

// Row of taps r: of the thread's rows of a patch, 2 * warp and the next, those of the window that they meet there.
__device__ __forceinline__ void fold(Smem& smem, const Sums& sums, int r) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sum = 0;
#pragma unroll
            for (int at = 0; at < WARPS; ++at) {
                const int t = 2 * at + r * DIL_H;
                if (at == warp) sum = sums[i][4 * t + e] + sums[i][4 * (t + 1) + 2 + e];
            }
            smem.sums[warp][r][lane / 4][i * EDGE + lane % 4 * 2 + e] = sum;
        }
}

// Writes what units [first, end), all of one filter, add to it, as one of its parts.
__device__ __forceinline__ void add_up(const Params& p, Smem& smem, const Sums& sums, int filter, int part, int first,
                                       int end) {
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; ++r) fold(smem, sums, r);
    __syncthreads();
    const int lane = threadIdx.x % 32, b = lane % EDGE;
    float* const partials = p.partials + ((i64)part * p.channels + filter) * (R * S);
    for (int at = threadIdx.x / 32; at < R * S; at += WARPS) {
        const int r = at / S, s = at % S;
        float sum = hc::warp_sum(smem.sums[lane / EDGE][r][b][b + s * DIL_W]);
        if (sum * 0.f != 0.f) sum = hc::warp_sum(sum_again(p, first, end, r, s));
        if (lane == 0) partials[at] = sum;
    }
}

// ---- A block ----

// One thread asks for a strip of both planes.
__device__ __forceinline__ void ask(const Params& p, char* landing, u64* full, const Unit& unit) {
    const int row = unit.strip * p.cut.rows;
    hc::patches::ask(p.x_side.planes, landing, full, p.x, unit.channel / MULTIPLIER, unit.image, row);
    hc::patches::ask(p.dy_side.planes, landing + p.x_landing_bytes, full, p.dy, unit.channel, unit.image, row);
    hc::ptx::mbarrier_arrive(full);
}

// The block that does unit `index`.
__device__ __forceinline__ int block_of(const Cut& cut, int index) {
    return int((((u64)index + 1) * gridDim.x - 1) / cut.units);
}

// A filter's parts behind the last one that a block writes.
__device__ __forceinline__ void clear_parts(const Params& p, int filter, int part) {
    for (; part < p.parts; ++part)
        for (int i = threadIdx.x; i < R * S; i += THREADS)
            p.partials[((i64)part * p.channels + filter) * (R * S) + i] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_patch_wgrad(const Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    __shared__ u64 full[BUFFERS];
    char* const x = dynamic_smem + BUFFERS * p.landing_bytes;
    char* const dy = x + p.x_padded_bytes;
    const bool leads = threadIdx.x == 0;
    const int end = first_unit(p.cut, blockIdx.x + 1);
    int index = first_unit(p.cut, blockIdx.x), asked = index;
    Unit unit = unit_at(p.cut, index), next = unit;
    if (leads) {
        for (int i = 0; i < BUFFERS; ++i) hc::ptx::mbarrier_init(&full[i], 1);
        hc::ptx::fence_mbarrier_init();
        for (int i = 0; i < BUFFERS && asked < end; ++i, ++asked, next.advance(p.cut))
            ask(p, dynamic_smem + i * p.landing_bytes, &full[i], next);
    }
    clear(x, p.padded_bytes);
    const Padder<elem_t, SHIFT, 2> of_x(p.x_side);
    const Padder<elem_t, 0, 2> of_dy(p.dy_side);
    __syncthreads();
    const int planes = p.cut.images * p.cut.strips;  // units of a filter
    hc::Cursor in;
    while (index < end) {
        const int filter = unit.channel, first = index, stop = min(end, (filter + 1) * planes);
        Sums sums = {};
        for (; index < stop; ++index, unit.advance(p.cut), in.advance(BUFFERS)) {
            char* const landed = dynamic_smem + in.index * p.landing_bytes;
            const int row = unit.strip * p.cut.rows;
            hc::wait(&full[in.index], in.parity);
            of_x.pad(p.x_side, x, landed, row);
            of_dy.pad(p.dy_side, dy, landed + p.x_landing_bytes, row);
            hc::ptx::fence_proxy_async_shared();
            __syncthreads();  // the strips are padded
            if (leads && asked < end) {
                ask(p, landed, &full[in.index], next);
                ++asked, next.advance(p.cut);
            }
            multiply(sums, p, x, dy);
            __syncthreads();  // and have been read
        }
        const int part = blockIdx.x - block_of(p.cut, filter * planes);
        add_up(p, smem, sums, filter, part, first, stop);
        if (stop == (filter + 1) * planes) clear_parts(p, filter, part + 1);
    }
}
