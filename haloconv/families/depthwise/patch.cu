// depthwise_patch: fprop and dgrad of depthwise layers in 16 bits on Hopper's tensor cores.
//
//   y[8 i + a, 8 j + b] = sum over (t, u) of A[(a, b), (t, u)] * x[8 i + t, 8 j + u]      A = w[t - a, u - b]
//
// The 64 outputs of a patch of 8 x 8 are the rows of one wgmma, the patches of a strip its columns; k walks over the
// window of a patch. The trick: windows overlap in shared memory as they do in the plane. A column of B is 16 bytes
// further on than the one before it, which is what wgmma reads without a swizzle. A stays in registers while a block
// does the planes of one channel, which come and go by bulk copies. dgrad is fprop with the filter flipped.
//
// A zero of A times an infinity is a NaN that does not belong into the sum: sums that are not finite are summed once
// more over the taps alone.
// Budget: 4 * SLICES registers for A, 4 * GROUPS for sums; BUFFERS strips of the input as it lands, one
// padded, one of the output.
#include "families/depthwise/finish.cuh"
#include "families/depthwise/patches.cuh"
#include "families/depthwise/taps.cuh"
#include "kernels/ptx/ldmatrix.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others are integers.
//   DGRAD                1: in is dy, out is dx, and taps count from the filter's end
//   R S DIL_H DIL_W      filter taps; pixels
//   MULTIPLIER           M: filters of a channel
//   SHIFT                left padding modulo 8 columns
//   GROUPS               rows of patches that are multiplied at a time
//   BUFFERS              strips of the input under way, the one that is padded included
//   MIN_BLOCKS           blocks per multiprocessor that registers must allow
//   HAS_BIAS             adds bias[k]
//   AFFINE ACTIVATION    of an epilogue of fprop, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh)
using hc::i64;
using elem_t = ELEM;
using hc::ptx::u32;
using hc::ptx::u64;
using namespace hc::patches;

constexpr int COLUMNS = GROUPS * 8;  // patches of a product: eight neighbours in each row of patches
constexpr int HEIGHT = EDGE + (R - 1) * DIL_H;
constexpr int PIECES = (EDGE + (S - 1) * DIL_W + EDGE - 1) / EDGE;  // of 8 columns, in a row of a window
constexpr int PAIRS = PIECES / 2;                                   // of pieces side by side
// k goes over pairs of pieces, side by side or, of the last piece of an odd number, below each other.
constexpr int SLICES = HEIGHT * PAIRS + PIECES % 2 * ((HEIGHT + 1) / 2);

constexpr int READS = SLICES <= 12 ? 2 : 1;  // as registers allow

static_assert(sizeof(elem_t) == 2, "patches are of 16-bit elements");
static_assert(SHIFT >= 0 && SHIFT < EDGE, "the left padding modulo a piece");

struct Params {
    const elem_t *in, *w, *bias;
    elem_t* out;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as out
#endif
    i64 w_k, w_r, w_s;  // strides in elements
    Side side;
    Cut cut;
    int channels, out_rows, out_cols;
    int landing_bytes, padded_bytes;  // of a buffer of each
};

// Where piece `half` of a slice stands in the window.
struct Piece {
    int row, piece;
};
__device__ __forceinline__ constexpr Piece piece_of(int slice, int half) {
    if (slice < HEIGHT * PAIRS) return {slice / PAIRS, slice % PAIRS * 2 + half};
    return {(slice - HEIGHT * PAIRS) * 2 + half, PIECES - 1};
}

// ---- Shared memory ----

// The filter of one channel between zeros, as it is, and once more without the first element of each row: then any two
// neighbours are a word of one of both.
struct Filter {
    static constexpr int ABOVE = EDGE - 1, ROWS = ABOVE + HEIGHT + 1, BEFORE = EDGE, WIDTH = BEFORE + EDGE * PIECES + 2;
    alignas(4) unsigned short of[2][ROWS][WIDTH];

    __device__ __forceinline__ void load(const Params& p, int channel) {
        const elem_t* filter = hc::filter_of(p, channel);
        for (int i = threadIdx.x; i < 2 * ROWS * WIDTH; i += THREADS) {
            const int across = i % WIDTH - BEFORE + i / (ROWS * WIDTH), down = i / WIDTH % ROWS - ABOVE;
            const bool meets = across >= 0 && across < S * DIL_W && across % DIL_W == 0 && down >= 0 &&
                               down < R * DIL_H && down % DIL_H == 0;
            (&of[0][0][0])[i] = meets ? hc::tap(p, filter, down / DIL_H, across / DIL_W).bits : 0;
        }
    }
};

struct Smem {
    Filter filter;
    alignas(PIECE_BYTES) char idle[THREADS * PIECE_BYTES];
    alignas(8) u64 full[BUFFERS];
    Unit next;  // that has not been asked for: one thread has it, here because registers are few
};

// ---- A ----

// Fragments of A of one channel, and its bias: warp w has the rows of outputs 2 * w and the next of a patch.
struct Weights {
    u32 of[SLICES][4];
    float bias;

    __device__ __forceinline__ void set(const Params& p, const Filter& filter, int channel) {
        const int lane = threadIdx.x % 32, first = lane % 4 * 2 - lane / 4, odd = first & 1;
        const unsigned short* from =
            &filter.of[odd][Filter::ABOVE - int(threadIdx.x) / 32 * 2][Filter::BEFORE + first - odd];
        bias = HAS_BIAS ? hc::to_acc(p.bias[channel]) : 0.f;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Piece at = piece_of(slice, i / 2);
                of[slice][i] = *reinterpret_cast<const u32*>(from + (at.row - i % 2) * Filter::WIDTH + at.piece * EDGE);
            }
    }
};

// ---- A product: GROUPS rows of patches, eight in each ----

// Sum 4 * i + 2 * j + e of a thread: row of patches i, patch 2 * (lane % 4) + e, its row 2 * warp + j, column lane / 4.
using Sums = float[COLUMNS / 2];

// `window` is the first patch's window.
__device__ __forceinline__ void multiply(Sums& sums, const Params& p, const Weights& weights, const char* window) {
    const u32 address = hc::ptx::shared_address(window), row = p.side.row_bytes / PIECE_BYTES;
    const u64 side_by_side = hc::ptx::smem_descriptor(address, PIECE_BYTES, EDGE * p.side.row_bytes, 0);
    const u64 below = hc::ptx::smem_descriptor(address, p.side.row_bytes, EDGE * p.side.row_bytes, 0);
    hc::ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        const Piece at = piece_of(slice, 0);
        const u64 from = slice < HEIGHT * PAIRS ? side_by_side : below;
        hc::ptx::wgmma_rs<elem_t, COLUMNS>(sums, weights.of[slice], hc::ptx::moved(from, at.row * row + at.piece),
                                           slice > 0);
    }
    hc::ptx::wgmma_commit_group();
    hc::ptx::wgmma_wait_group<0>();
    hc::ptx::wgmma_hold(sums);
}

__device__ __forceinline__ bool finite(const Sums& sums) {
    float zeros[4] = {};  // chains of additions side by side
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) zeros[i % 4] += sums[i] * 0.f;
    return zeros[0] + zeros[1] + (zeros[2] + zeros[3]) == 0.f;
}

__device__ __forceinline__ void sum_again(Sums& sums, const Params& p, int channel, const char* window) {
    const elem_t* filter = hc::filter_of(p, channel);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int i = 0; i < COLUMNS / 2; ++i) {
        const int row = i / 4 * EDGE + 2 * warp + i / 2 % 2, col = (lane % 4 * 2 + i % 2) * EDGE + lane / 4;
        const char* from = window + row * p.side.row_bytes + col * (int)sizeof(elem_t);
        float sum = 0;
#pragma unroll 1
        for (int r = 0; r < R; ++r)
#pragma unroll 1
            for (int s = 0; s < S; ++s) {
                const auto x = reinterpret_cast<const elem_t*>(from + r * DIL_H * p.side.row_bytes)[s * DIL_W];
                sum += hc::to_acc(x) * hc::to_acc(hc::tap(p, filter, r, s));
            }
#pragma unroll
        for (int at = 0; at < COLUMNS / 2; ++at)
            if (at == i) sums[at] = sum;
    }
}

// What becomes of a product's sums, whose first patch begins in row `row` of the output and column `col`.
__device__ __forceinline__ void finish(Sums& sums, const Params& p, float bias, const Unit& unit, int row, int col) {
    const elem_t* plane = p.out + ((i64)unit.image * p.channels + unit.channel) * p.out_rows * p.out_cols;
    hc::Finish own;
    own.load(p.bias, unit.channel);
    row += int(threadIdx.x) / 32 * 2, col += int(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
        const int y = row + i / 4 * EDGE + i / 2 % 2, x = col + (int(threadIdx.x) % 4 * 2 + i % 2) * EDGE;
        const auto residual =
            hc::residual_at<elem_t>(p, plane + (i64)y * p.out_cols + x, y < p.out_rows && x < p.out_cols);
        sums[i] = own(sums[i] + bias, hc::to_acc(residual));
    }
}

// ---- Stores ----

// Eight lanes have the eight patches of a row of patches: 16 bytes of a row of the output each.
struct Writer {
    int row;    // of the lane's first piece; pieces of two rows of patches are stored at a time
    int patch;  // its number in the row
    char* idle;

    __device__ __forceinline__ explicit Writer(char* idle_pieces)
        : row(threadIdx.x % 32 / 16 * EDGE + threadIdx.x / 32 * 2 + threadIdx.x / 8 % 2),
          patch(threadIdx.x % 8),
          idle(idle_pieces + threadIdx.x * PIECE_BYTES) {}

    // `to` is the first output of the first patch; `cols` columns of the output begin there.
    __device__ __forceinline__ void store(const Sums& sums, float bias, char* to, int out_row_bytes, int cols) const {
        const bool inside = patch * EDGE < cols;  // patches behind the row's end go nowhere
        char* piece = inside ? to + row * out_row_bytes + patch * PIECE_BYTES : idle;
        const int step = inside ? 2 * EDGE * out_row_bytes : 0;
#pragma unroll
        for (int i = 0; i < GROUPS; i += 2) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (i + j / 2 < GROUPS)
                    words[j] = hc::march::packed<elem_t>(sums[i * 4 + j * 2] + bias, sums[i * 4 + j * 2 + 1] + bias);
            if (i + 1 < GROUPS)
                hc::ptx::stmatrix_x4_trans(piece, words);
            else
                hc::ptx::stmatrix_x2_trans(piece, {words[0], words[1]});
            piece += step;
        }
    }
};

__device__ __forceinline__ void convolve(const Params& p, const Weights& weights, const Writer& writer,
                                         const Unit& unit, const char* strip, char* out) {
    const int out_row_bytes = p.out_cols * (int)sizeof(elem_t);
    for (int row = 0; row < p.cut.rows; row += GROUPS * EDGE)
        for (int col = 0; col < p.out_cols; col += 8 * EDGE) {
            const char* window = strip + row * p.side.row_bytes + col * (int)sizeof(elem_t);
            Sums sums;
            multiply(sums, p, weights, window);
            if (!finite(sums)) sum_again(sums, p, unit.channel, window);
            if constexpr (EPILOGUE) finish(sums, p, weights.bias, unit, unit.strip * p.cut.rows + row, col);
            writer.store(sums, EPILOGUE ? 0.f : weights.bias, out + row * out_row_bytes + col * (int)sizeof(elem_t),
                         out_row_bytes, p.out_cols - col);
        }
}

// ---- A block ----

// One thread asks for a strip.
__device__ __forceinline__ void ask(const Params& p, char* landing, u64* full, const Unit& unit) {
    hc::patches::ask(p.side.planes, landing, full, p.in, unit.channel / MULTIPLIER, unit.image,
                     unit.strip * p.cut.rows);
    hc::ptx::mbarrier_arrive(full);
}

// One thread sends a strip on its way.
__device__ __forceinline__ void send(const Params& p, const char* strip, const Unit& unit) {
    const int first_row = unit.strip * p.cut.rows, left = p.out_rows - first_row;
    const int rows = left < p.cut.rows ? left : p.cut.rows;
    elem_t* to = p.out + (((i64)unit.image * p.channels + unit.channel) * p.out_rows + first_row) * p.out_cols;
    hc::ptx::cp_async_bulk_global_shared(to, strip, rows * p.out_cols * (int)sizeof(elem_t));
    hc::ptx::cp_async_bulk_commit_group();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_patch(const Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    char* const padded = dynamic_smem + BUFFERS * p.landing_bytes;
    char* const leaving = padded + p.padded_bytes;
    const bool leads = threadIdx.x == 0;
    const int end = first_unit(p.cut, blockIdx.x + 1);
    int index = first_unit(p.cut, blockIdx.x);
    Unit unit = unit_at(p.cut, index);
    if (leads) {
        for (int i = 0; i < BUFFERS; ++i) hc::ptx::mbarrier_init(&smem.full[i], 1);
        hc::ptx::fence_mbarrier_init();
        smem.next = unit;
        for (int i = 0; i < BUFFERS && index + i < end; ++i, smem.next.advance(p.cut))
            ask(p, dynamic_smem + i * p.landing_bytes, &smem.full[i], smem.next);
    }
    clear(padded, p.padded_bytes);
    const Padder<elem_t, SHIFT, READS> padder(p.side);
    const Writer writer(smem.idle);
    Weights weights;
    hc::Cursor in;
    for (int channel = -1; index < end; ++index, unit.advance(p.cut), in.advance(BUFFERS)) {
        if (unit.channel != channel) {
            channel = unit.channel;
            smem.filter.load(p, channel);
            __syncthreads();
            weights.set(p, smem.filter, channel);
        }
        char* const landed = dynamic_smem + in.index * p.landing_bytes;
        hc::wait(&smem.full[in.index], in.parity);
        padder.pad(p.side, padded, landed, unit.strip * p.cut.rows);
        hc::ptx::fence_proxy_async_shared();
        if (leads) hc::ptx::cp_async_bulk_wait_group_read<0>();
        __syncthreads();  // the strip is padded, and the one before has left
        if (leads && index + BUFFERS < end) {
            ask(p, landed, &smem.full[in.index], smem.next);
            smem.next.advance(p.cut);
        }
        convolve(p, weights, writer, unit, padded, leaving);
        hc::ptx::fence_proxy_async_shared();
        __syncthreads();
        if (leads) send(p, leaving, unit);
    }
    if (leads) hc::ptx::cp_async_bulk_wait_group_read<0>();
}
