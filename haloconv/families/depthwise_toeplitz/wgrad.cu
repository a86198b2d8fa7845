// depthwise_toeplitz_wgrad: filter gradients of depthwise layers with large filters on tensor cores, as partial sums.
//
//   partials[part][k, r, s] = sum over rows p of dy, and columns j of x, of x[p + r - top, j] * dy[p, j - s + left]
//
// For one p that is a product of 16 * M_TILES rows of x, one for each r, with a matrix of dy that is constant along its
// diagonals: element (j, s) is the pixel j - s + left of row p. The trick: all rows of all planes of a block go into
// the same few sums, one for each tap. Rows of x come by ldmatrix as they lie in memory; the matrix is read from the
// row of dy between zeros, in 16 bits also from a copy that begins one pixel later, so that any two neighbours are a
// word.
//
// What lies outside of both rows is left out. A zero times an infinity is a NaN that does not belong into the sum: taps
// whose sums are not finite are summed once more, over the pixels alone; so are all where dy is not finite, as such a
// pixel also belongs into taps that meet it beside the image.
// Budget: 4 * M_TILES * N_TILES registers for sums; BUFFERS units of both planes and the copy of dy in shared memory.
#include "families/depthwise_toeplitz/bands.cuh"
#include "families/depthwise_toeplitz/planes.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/warp_sum.cuh"

// Constants: ELEM is hc::fp16, hc::bf16, float (multiplied in TF32) or hc::tf32x3; all others are integers.
//   R S                  filter taps
//   PAD_LEFT             columns of zeros before the image
//   MULTIPLIER           M: filters of a channel
//   X_GROUPS DY_COLS     groups of 16 bytes of a row of x; columns of dy
//   X_COPY DY_COPY       bytes of one copy: 16, 8, 4, or 2 (through registers)
//   IMAGES BUFFERS       images of a unit of work; units under way, the one that is multiplied included
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
using hc::i64;
using hc::toeplitz::GROUP_BYTES;
using elem_t = ELEM;
using multiplied_t = hc::toeplitz::Multiplied<elem_t>::type;

constexpr int GROUP = GROUP_BYTES / (int)sizeof(elem_t), TILE_GROUPS = 8 / GROUP;  // columns; groups of 8 taps
constexpr int M_TILES = (R + 15) / 16, N_TILES = (S + 7) / 8;                      // of 16 rows and 8 columns of taps
constexpr int WARPS = THREADS / 32, SUM_ROWS = 16 * M_TILES, SUM_COLS = 8 * N_TILES;
constexpr int COPIES = 4 / (int)sizeof(elem_t);                       // of dy, for pairs at odd places
constexpr int STEP_ROWS = X_GROUPS >= 6 ? 1 : X_GROUPS >= 3 ? 2 : 4;  // short ones are loaded together

// Matrices of dy: number i has the pixels GROUP * (i - FEWEST) + PAD_LEFT + k - n of a row.
constexpr int FEWEST = (N_TILES - 1) * TILE_GROUPS, MATRICES = X_GROUPS + FEWEST;

static_assert(THREADS % 32 == 0, "a block is a whole number of warps");
static_assert(BUFFERS >= 2, "units are copied while one is multiplied");

__device__ __forceinline__ constexpr bool meets(int matrix) {
    const int first = GROUP * (matrix - FEWEST) + PAD_LEFT;
    return first + GROUP > 0 && first - 7 < DY_COLS;
}

struct Params {
    const elem_t *x, *dy;
    float* partials;  // [part][K][R][S]
    hc::toeplitz::Staged x_staged, dy_staged;
    hc::strips::Partition partition;
    int x_bytes, dy_bytes;  // of a buffer: x, then dy
    int h, w, p, pad_top;
};

// ---- A warp's step: STEP_ROWS rows of dy ----

using Sums = float[M_TILES][N_TILES][4];
using Matrices = unsigned[MATRICES];

// Two groups of x times the matrices of dy that tiles of taps meet them with: number `group` is that of the first one
// and of tile 0.
__device__ __forceinline__ void multiply(float (&sums)[N_TILES][4], const unsigned (&x)[4], const Matrices& dy,
                                         int group) {
#pragma unroll
    for (int tile = 0; tile < N_TILES; ++tile) {
        const int matrix = group - tile * TILE_GROUPS + FEWEST;
        const bool low = meets(matrix), high = group + 1 < X_GROUPS && meets(matrix + 1);
        if (low && high)
            hc::mma(sums[tile], x, {dy[matrix], dy[matrix + 1]}, multiplied_t{});
        else if (low)
            hc::mma_half(sums[tile], {x[0], x[1]}, dy[matrix], multiplied_t{});
        else if (high)
            hc::mma_half(sums[tile], {x[2], x[3]}, dy[matrix + 1], multiplied_t{});
    }
}

// Adds `more`, which become zero.
__device__ __forceinline__ void move(float (&sums)[N_TILES][4], float (&more)[N_TILES][4]) {
#pragma unroll
    for (int i = 0; i < N_TILES * 4; ++i) (&sums[0][0])[i] += (&more[0][0])[i], (&more[0][0])[i] = 0;
}

// `row` is the lane's place in group 0 of x: row lane % 16 of the tile, group lane / 16. In two terms tensor cores cut
// what does not fit at each step: sums of PART_GROUPS groups are added rounded to nearest, and those of small products,
// of which little is cut, are apart from those of large ones.
__device__ __forceinline__ void multiply_row(float (&sums)[N_TILES][4], const char* row, const Matrices& dy,
                                             const Matrices& small_dy) {
    constexpr int PART_GROUPS = 16;
    float part[N_TILES][4] = {}, small_part[N_TILES][4] = {};
#pragma unroll
    for (int group = 0; group < X_GROUPS; group += 2) {
        unsigned x[4] = {};
        if (group + 1 < X_GROUPS) {
            hc::ptx::ldmatrix_x4(x, row + group * GROUP_BYTES);
        } else {
            unsigned two[2];
            hc::ptx::ldmatrix_x2(two, row + group * GROUP_BYTES);
            x[0] = two[0], x[1] = two[1];
        }
        if constexpr (hc::toeplitz::in_terms(elem_t{})) {
            unsigned small[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) small[i] = hc::toeplitz::small_term(x[i]);
            multiply(small_part, small, dy, group);
            multiply(part, x, dy, group);
            multiply(small_part, x, small_dy, group);
            if ((group + 2) % PART_GROUPS == 0 || group + 2 >= X_GROUPS) {
                move(part, small_part);
                move(sums, part);
            }
        } else {
            multiply(sums, x, dy, group);
        }
    }
}

// The rows of dy of a unit that are a warp's: every WARPS-th of all images.
struct Walk {
    const char *x, *dy;  // the lane's places in the rows of x that the row of dy meets, and in that row
    int row, rows;       // of the image
    int hop;             // rows to the next one, where whole images do not count
    int x_hop, dy_hop;   // bytes to it in the same image, and what more if it is in the next image
    int x_next, dy_next;

    __device__ __forceinline__ Walk(const Params& p, const char* x, const char* dy, int rows)
        : x(x), dy(dy), row(0), rows(rows) {
        x_next = p.x_staged.plane_bytes() - rows * p.x_staged.row_bytes;
        dy_next = p.dy_staged.plane_bytes() - rows * p.dy_staged.row_bytes;
        go(p, threadIdx.x / 32);
        advance();
        go(p, WARPS);
    }

    __device__ __forceinline__ void go(const Params& p, int by) {
        const int images = by / rows;
        hop = by - images * rows;
        x_hop = images * p.x_staged.plane_bytes() + hop * p.x_staged.row_bytes;
        dy_hop = images * p.dy_staged.plane_bytes() + hop * p.dy_staged.row_bytes;
    }
    __device__ __forceinline__ void advance() {
        row += hop, x += x_hop, dy += dy_hop;
        if (row >= rows) row -= rows, x += x_next, dy += dy_next;
    }
};

template <int COUNT>
__device__ __forceinline__ void multiply_rows(Sums& sums, const Params& p, Walk& walk) {
    Matrices dy[COUNT], small_dy[COUNT];
    const char* x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int j = 0; j < MATRICES; ++j)
            if (meets(j)) dy[i][j] = *reinterpret_cast<const unsigned*>(walk.dy + j * GROUP_BYTES);
        if constexpr (hc::toeplitz::in_terms(elem_t{})) {
#pragma unroll
            for (int j = 0; j < MATRICES; ++j)
                if (meets(j)) small_dy[i][j] = hc::toeplitz::small_term(dy[i][j]);
        }
        x[i] = walk.x;
        walk.advance();
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            multiply_row(sums[m], x[i] + m * 16 * p.x_staged.row_bytes, dy[i], small_dy[i]);
}

__device__ __forceinline__ void multiply_unit(Sums& sums, const Params& p, int rows, const char* buffer,
                                              const char* dy_copy) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int at = PAD_LEFT - FEWEST * GROUP - lane / 4 + lane % 4 * COPIES, odd = at & (COPIES - 1);
    Walk walk(p, buffer + lane % 16 * p.x_staged.row_bytes + lane / 16 * GROUP_BYTES,
              (odd ? dy_copy : buffer + p.x_bytes) + p.dy_staged.left + (at - odd) * (int)sizeof(elem_t), rows);
    int left = (IMAGES * rows - warp + WARPS - 1) / WARPS;
#pragma unroll 1
    for (; left >= STEP_ROWS; left -= STEP_ROWS) multiply_rows<STEP_ROWS>(sums, p, walk);
    if constexpr (STEP_ROWS > 1) {
#pragma unroll 1
        for (; left > 0; --left) multiply_rows<1>(sums, p, walk);
    }
}

// ---- What is done to dy once it has landed ----

// Copies planes of 16-bit elements to where the copy begins one element later. Returns whether a thread met an element
// that is not finite.
__device__ __forceinline__ bool shift(const char* from, char* to, int bytes) {
    constexpr unsigned CARRIES = hc::toeplitz::below_infinity(elem_t{}) * 0x10001;
    unsigned carried = 0;
    for (int i = threadIdx.x * 16; i < bytes; i += THREADS * 16) {
        const auto words = *reinterpret_cast<const hc::strips::Piece*>(from + i);
        const unsigned next = i + 16 < bytes ? *reinterpret_cast<const unsigned*>(from + i + 16) : 0;
        hc::strips::Piece shifted;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            shifted.word[j] = words.word[j] >> 16 | (j < 3 ? words.word[j < 3 ? j + 1 : 0] : next) << 16;
            carried |= (words.word[j] & 0x7fff7fff) + CARRIES;
        }
        *reinterpret_cast<hc::strips::Piece*>(to + i) = shifted;
    }
    return carried & 0x80008000;
}

// ---- The taps ----

// A lane's part of one tap's sum over the block's units, of products that belong into it only.
__device__ __noinline__ float sum_again(const Params& p, int filter, int first, int r, int s) {
    float sum = 0;
    for (int i = first; i < p.partition.units; i += p.partition.parts) {
        const hc::strips::Unit unit(i, p.partition.strips);
        const int begin = unit.strip * p.partition.rows;
        for (int image = unit.image * IMAGES; image < (unit.image + 1) * IMAGES && image < p.x_staged.images; ++image) {
            const elem_t* x = p.x + image * p.x_staged.image + filter / MULTIPLIER * p.x_staged.channel;
            const elem_t* dy = p.dy + image * p.dy_staged.image + filter * p.dy_staged.channel;
            for (int row = begin; row < begin + p.partition.rows && row < p.p; ++row)
                for (int col = threadIdx.x % 32; col < DY_COLS; col += 32) {
                    const int h = row + r - p.pad_top, w = col + s - PAD_LEFT;
                    const bool inside = (unsigned)h < (unsigned)p.h && (unsigned)w < (unsigned)p.w;
                    sum += hc::to_acc(dy[row * p.dy_staged.row + col * p.dy_staged.col]) *
                           (inside ? hc::to_acc(x[h * p.x_staged.row + w * p.x_staged.col]) : 0.f);
                }
        }
    }
    return sum;
}

// Adds the sums of all warps, and writes those of the taps.
__device__ __forceinline__ void add_up(const Params& p, float* smem, const Sums& sums, bool suspect, int filter,
                                       int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; ++i) {
        const int m = i / (N_TILES * 4), tile = i / 4 % N_TILES, j = i % 4;
        smem[(warp * SUM_ROWS + m * 16 + j / 2 * 8 + lane / 4) * SUM_COLS + tile * 8 + lane % 4 * 2 + j % 2] =
            sums[m][tile][j];
    }
    __syncthreads();
    float* const partials = p.partials + ((i64)first * p.partition.channels + filter) * (R * S);
    for (int begin = warp * 32; begin < R * S; begin += THREADS) {
        const int at = begin + lane, r = at / S, s = at - r * S;
        float sum = 0;
        if (at < R * S)
            for (int i = 0; i < WARPS; ++i) sum += smem[(i * SUM_ROWS + r) * SUM_COLS + s];
        unsigned again = __ballot_sync(0xffffffffu, at < R * S && (suspect || sum * 0.f != 0.f));
        for (; again; again &= again - 1) {
            const int other = __ffs(again) - 1, tap = begin + other;
            const float exact = hc::warp_sum(sum_again(p, filter, first, tap / S, tap % S));
            if (lane == other) sum = exact;
        }
        if (at < R * S) partials[at] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    depthwise_toeplitz_wgrad(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    const int filter = blockIdx.x % p.partition.channels, first = blockIdx.x / p.partition.channels;
    const hc::toeplitz::Copier<elem_t, X_COPY, THREADS> of_x(p.x_staged, p.x, filter / MULTIPLIER);
    const hc::toeplitz::Copier<elem_t, DY_COPY, THREADS> of_dy(p.dy_staged, p.dy, filter);
    hc::strips::Ring<BUFFERS> ring(p.partition, dynamic_smem, first);
    const auto copy = [&](char* buffer, int images, int strip) {
        of_x.template copy<IMAGES>(p.x_staged, buffer, images * IMAGES, strip * p.partition.rows - p.pad_top);
        of_dy.template copy<IMAGES>(p.dy_staged, buffer + p.x_bytes, images * IMAGES, strip * p.partition.rows);
    };
    hc::toeplitz::clear<THREADS>(dynamic_smem, BUFFERS * p.partition.buffer_bytes);
    __syncthreads();
    ring.fill(copy);
    char* const dy_copy = dynamic_smem + BUFFERS * p.partition.buffer_bytes;
    Sums sums = {};
    bool suspect = false;
    for (; ring.has(); ring.advance()) {
        ring.next_buffer(copy);
        char* const buffer = const_cast<char*>(ring.buffer());
        if constexpr (sizeof(elem_t) == 4) {
            of_x.template settle<IMAGES>(p.x_staged, buffer);
            suspect |= of_dy.template settle<IMAGES>(p.dy_staged, buffer + p.x_bytes);
        } else {
            suspect |= shift(buffer + p.x_bytes, dy_copy, p.dy_bytes);
        }
        __syncthreads();
        const int left = p.p - ring.unit.strip * p.partition.rows;
        multiply_unit(sums, p, left < p.partition.rows ? left : p.partition.rows, buffer, dy_copy);
    }
    suspect = __syncthreads_or(suspect);  // also: the last planes are read, and their place is free
    add_up(p, reinterpret_cast<float*>(dynamic_smem), sums, suspect, filter, first);
}
