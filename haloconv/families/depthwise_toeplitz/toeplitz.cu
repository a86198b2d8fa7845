// depthwise_toeplitz: fprop and dgrad of depthwise layers with large filters on tensor cores.
//
//   y[row, col] = sum over r, k of x[row + r, k] * band_r[k, col],   band_r[k, col] = w[r, k - col]
//
// A row of the filter is a banded matrix, constant along its diagonals, of a few more input columns than 8 output
// columns and the filter's width. mma.sync multiplies 16 rows of planes with it: 8 rows of each of two half tiles,
// mostly of two images. Rows come by ldmatrix as they lie in memory. The two tricks: a banded matrix is read, as
// they are needed, from one row of the filter between zeros, where element (k, col) stands at k - col; and rows that
// are read once serve all groups of 8 output rows that meet them, each with another row of the filter.
//
// Groups of columns and of rows that lie outside of the image are left out. A zero of the matrix times an infinity is a
// NaN that does not belong into the sum: sums that are not finite are summed once more over the taps alone.
// Budget: 4 * M_TILES * ROW_GROUPS * N_TILES registers for sums, 2 * (HI - LO) for rows, a matrix for each row group.
#include "families/depthwise/taps.cuh"
#include "families/depthwise_toeplitz/bands.cuh"
#include "families/depthwise_toeplitz/planes.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/ldmatrix.cuh"

// Constants: ELEM is hc::fp16, hc::bf16, float (multiplied in TF32) or hc::tf32x3; all others are integers.
//   DGRAD                1: in is dy, out is dx, and taps count from the filter's end
//   R S                  filter taps
//   SHIFT                columns from the first one of a window to the first one that the filter meets
//   MULTIPLIER           M: filters of a channel
//   M_TILES              16 rows each: pairs of half tiles of a warp
//   ROW_GROUPS N_TILES   8 output rows, 8 output columns of a half tile
//   LO HI                groups of columns of a window that may lie inside the image
//   IMAGES BUFFERS       images of a unit of work; units under way, the one that is multiplied included
//   COPY_BYTES           of one copy: 16, 8, 4, or 2 (through registers)
//   STORE_PAIRS          1: columns of the output are neighbours in memory and leave in aligned pairs
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
//   HAS_BIAS             fprop adds bias[k]
using hc::i64;
using elem_t = ELEM;
using Band = hc::toeplitz::Bands<elem_t, R, S, SHIFT>;
using multiplied_t = hc::toeplitz::Multiplied<elem_t>::type;

constexpr int GROUP = Band::GROUP, TILE_GROUPS = 8 / GROUP;  // columns of a group; groups of 8 output columns
constexpr int GROUPS = HI - LO;
constexpr int HALVES = 2 * M_TILES, WARPS = THREADS / 32;
constexpr int STEPS = R + 8 * (ROW_GROUPS - 1);  // input rows that the first rows of a half tile's groups meet

static_assert(ROW_GROUPS == 1 || ROW_GROUPS == 2, "steps that one of two groups meets are told apart");

struct Params {
    const elem_t *in, *w, *bias;
    elem_t* out;
    i64 w_k, w_r, w_s;  // strides in elements
    i64 out_n, out_c, out_h, out_w;
    hc::toeplitz::Staged staged;
    hc::strips::Partition partition;
    int out_rows, out_cols, in_cols, pad_top, pad_left;
    int margin;                // rows of zeros that a half tile may meet beyond the image
    int window;                // bytes from a row of a plane to group LO of the first window
    int row_parts, col_parts;  // half tiles of a strip
};

// One of a warp's half tiles: 8 * ROW_GROUPS by 8 * N_TILES outputs.
struct Half {
    int image, row, col;  // image of the unit; first output row of the plane, and column
    bool has;

    Half() = default;
    __device__ __forceinline__ Half(const Params& p, int strip, int index) {
        image = index % IMAGES, index /= IMAGES;
        has = index < p.row_parts * p.col_parts;
        index = has ? index : 0;
        row = strip * p.partition.rows + index % p.row_parts * (8 * ROW_GROUPS),
        col = index / p.row_parts * (8 * N_TILES);
    }
};

// The row of the image that is row 0 of a strip in shared memory.
__device__ __forceinline__ int first_row(const Params& p, int strip) {
    const int first = strip * p.partition.rows - p.pad_top;
    return first > -p.margin ? first : -p.margin;
}

// ---- A warp's sums ----

using Sums = float[M_TILES][ROW_GROUPS][N_TILES][4];
using Rows = unsigned[GROUPS][2];  // groups of columns of 8 rows of both halves

// `rows` is the lane's place: row lane % 8 of half lane / 8 % 2, in group LO + lane / 16.
__device__ __forceinline__ void load_rows(Rows& x, const char* rows) {
#pragma unroll
    for (int i = 0; i + 1 < GROUPS; i += 2) {
        unsigned four[4];
        hc::ptx::ldmatrix_x4(four, rows + i * hc::toeplitz::GROUP_BYTES);
        x[i][0] = four[0], x[i][1] = four[1], x[i + 1][0] = four[2], x[i + 1][1] = four[3];
    }
    if constexpr (GROUPS % 2 == 1) {
        unsigned two[2];
        hc::ptx::ldmatrix_x2(two, rows + (GROUPS - 1) * hc::toeplitz::GROUP_BYTES);
        x[GROUPS - 1][0] = two[0], x[GROUPS - 1][1] = two[1];
    }
}

// Which terms of rows and bands are multiplied. A large one is the value itself: tensor cores ignore its low bits.
enum class Terms { LARGE, SMALL_ROWS, SMALL_BANDS };

// Pairs of groups are those that one ldmatrix has read: their registers are neighbours, as an instruction wants them.
template <Terms TERMS>
__device__ __forceinline__ void multiply(float (&sums)[N_TILES][4], const Rows& rows, const Band::Fragments& band) {
    const auto word = [&](int i) {
        return TERMS == Terms::SMALL_BANDS ? hc::toeplitz::small_term(band.of[i]) : band.of[i];
    };
#pragma unroll
    for (int pair = 0; pair < GROUPS; pair += 2) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned word = (&rows[0][0])[pair * 2 + i < GROUPS * 2 ? pair * 2 + i : 0];
            x[i] = TERMS == Terms::SMALL_ROWS ? hc::toeplitz::small_term(word) : word;
        }
#pragma unroll
        for (int tile = 0; tile < N_TILES; ++tile) {
            const int at = LO + pair - tile * TILE_GROUPS;  // of the banded matrix
            const bool low = at >= 0 && at < Band::GROUPS;
            const bool high = at + 1 >= 0 && at + 1 < Band::GROUPS && pair + 1 < GROUPS;
            if (low && high)
                hc::mma(sums[tile], x, {word(at), word(at + 1)}, multiplied_t{});
            else if (low)
                hc::mma_half(sums[tile], {x[0], x[1]}, word(at), multiplied_t{});
            else if (high)
                hc::mma_half(sums[tile], {x[2], x[3]}, word(at + 1), multiplied_t{});
        }
    }
}

// One row of the filter. In two terms it has sums of its own, the small products first: tensor cores cut what does not
// fit at each step, where the sum over rows is rounded to nearest.
__device__ __forceinline__ void add_row(float (&sums)[N_TILES][4], const Rows& x, const Band::Fragments& band) {
    if constexpr (hc::toeplitz::in_terms(elem_t{})) {
        float of_row[N_TILES][4] = {};
        multiply<Terms::SMALL_ROWS>(of_row, x, band);
        multiply<Terms::SMALL_BANDS>(of_row, x, band);
        multiply<Terms::LARGE>(of_row, x, band);
#pragma unroll
        for (int i = 0; i < N_TILES * 4; ++i) (&sums[0][0])[i] += (&of_row[0][0])[i];
    } else {
        multiply<Terms::LARGE>(sums, x, band);
    }
}

// Steps [first, end), of which each has the rows that begin so many rows behind the first one of the half tiles'
// windows: they meet the row groups [BEGIN, END), each with another row of the filter.
template <int BEGIN, int END>
__device__ __forceinline__ void multiply_steps(Sums& sums, const Band& bands, const char* const (&rows)[M_TILES],
                                               int row_bytes, int first, int end) {
#pragma unroll 1
    for (int step = first; step < end; ++step) {
        Rows x[M_TILES];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) load_rows(x[m], rows[m] + step * row_bytes);
#pragma unroll
        for (int group = BEGIN; group < END; ++group) {
            const Band::Fragments band = bands.row(step - 8 * group);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) add_row(sums[m][group], x[m], band);
        }
    }
}

// Steps [first, end) with all rows of the filter that meet them. `groups` row groups have outputs.
__device__ __forceinline__ void multiply_half_tiles(Sums& sums, const Band& bands, const char* const (&rows)[M_TILES],
                                                    int row_bytes, int first, int end, int groups) {
    const auto most = [&](int least) { return first > least ? first : least; };
    const auto least = [&](int most) { return end < most ? end : most; };
    if (ROW_GROUPS == 1 || groups == 1) {
        multiply_steps<0, 1>(sums, bands, rows, row_bytes, first, least(R));
    } else {
        constexpr int SECOND = ROW_GROUPS - 1;  // 1; with one group this compiles, too
        multiply_steps<0, 1>(sums, bands, rows, row_bytes, first, least(R < 8 ? R : 8));
        if constexpr (R > 8) multiply_steps<0, SECOND + 1>(sums, bands, rows, row_bytes, most(8), least(R));
        multiply_steps<SECOND, SECOND + 1>(sums, bands, rows, row_bytes, most(R < 8 ? 8 : R), end);
    }
}

// ---- What leaves ----

// One output once more, over its taps alone.
__device__ __noinline__ float sum_again(const Params& p, const elem_t* plane, const elem_t* filter, float bias, int row,
                                        int col) {
    float sum = bias;
#pragma unroll 1
    for (int r = 0; r < R; ++r)
#pragma unroll 1
        for (int s = 0; s < S; ++s) {
            const int h = row + r - p.pad_top, w = col + s - p.pad_left;
            const bool inside = (unsigned)h < (unsigned)p.staged.height && (unsigned)w < (unsigned)p.in_cols;
            if (DGRAD && !inside) continue;  // no output is there; beside an image is its padding
            const float x = inside ? hc::to_acc(plane[h * p.staged.row + w * p.staged.col]) : 0.f;
            sum += x * hc::to_acc(hc::tap(p, filter, r, s));
        }
    return sum;
}

__device__ __forceinline__ bool finite(const Sums& sums) {
    float zeros[4] = {};  // chains of additions side by side
#pragma unroll
    for (int i = 0; i < M_TILES * ROW_GROUPS * N_TILES * 4; ++i) zeros[i % 4] += (&sums[0][0][0][0])[i] * 0.f;
    return zeros[0] + zeros[1] + (zeros[2] + zeros[3]) == 0.f;
}

struct Output {
    const elem_t* filter;
    int channel;
    float bias;
    bool suspect;  // the filter has an element that is not finite: also where zeros were left out

    // Sum i of a half's tiles: 2 * N_TILES of each row group, in row lane / 4 and columns 2 * (lane % 4) and the next.
    static __device__ __forceinline__ int row_of(const Half& at, int i) {
        return at.row + i / (2 * N_TILES) * 8 + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int col_of(const Half& at, int i) {
        return at.col + i / 2 % N_TILES * 8 + threadIdx.x % 4 * 2 + i % 2;
    }

    __device__ __forceinline__ void sum_half_again(const Params& p, Sums& sums, int m, int half, const Half& at,
                                                   int image) const {
        const elem_t* plane = p.in + (image + at.image) * p.staged.image + channel / MULTIPLIER * p.staged.channel;
#pragma unroll 1
        for (int i = 0; i < ROW_GROUPS * N_TILES * 2; ++i) {
            const float sum = sum_again(p, plane, filter, bias, row_of(at, i), col_of(at, i));
#pragma unroll
            for (int j = 0; j < ROW_GROUPS * N_TILES * 2; ++j)
                if (i == j) sums[m][j / (2 * N_TILES)][j / 2 % N_TILES][half * 2 + j % 2] = sum;
        }
    }

    __device__ __forceinline__ void store(const Params& p, const Sums& sums, int m, int half, const Half& at, int image,
                                          int end_row) const {
        const int col = col_of(at, 0);
        elem_t* to = p.out + (image + at.image) * p.out_n + channel * p.out_c + row_of(at, 0) * p.out_h + col * p.out_w;
#pragma unroll
        for (int group = 0; group < ROW_GROUPS; ++group, to += 8 * p.out_h) {
            if (row_of(at, 0) + group * 8 >= end_row) return;
#pragma unroll
            for (int tile = 0; tile < N_TILES; ++tile) {
                const float low = sums[m][group][tile][half * 2], high = sums[m][group][tile][half * 2 + 1];
                const int left = p.out_cols - col - tile * 8;
                if (STORE_PAIRS) {
                    if (left > 0) hc::toeplitz::store_pair(to + tile * 8, low, high);
                } else {
                    if (left > 0) to[tile * 8 * p.out_w] = hc::from_acc<elem_t>(low);
                    if (left > 1) to[(tile * 8 + 1) * p.out_w] = hc::from_acc<elem_t>(high);
                }
            }
        }
    }
};

// ---- A block ----

// Warps change places from unit to unit: half tiles at an image's borders have less to do, and each warp has a tensor
// core of its own.
__device__ __forceinline__ void convolve(const Params& p, const Band& bands, const Output& output,
                                         const hc::strips::Unit& unit, int round, const char* planes) {
    const int lane = threadIdx.x % 32, tasks = p.row_parts * p.col_parts * IMAGES;
    const int begin = first_row(p, unit.strip), image = unit.image * IMAGES;
    const int strip_end = (unit.strip + 1) * p.partition.rows,
              end_row = strip_end < p.out_rows ? strip_end : p.out_rows;
    for (int task = (threadIdx.x / 32 + round) % WARPS * HALVES; task < tasks; task += WARPS * HALVES) {
        Half halves[HALVES];
        const char* rows[M_TILES];
        int first = STEPS, end = 0, groups = 0;
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            halves[i] = Half(p, unit.strip, task + i);
            const Half& at = halves[i];
            const int before = p.pad_top - at.row, has = at.has ? (end_row - at.row + 7) / 8 : 0;
            first = before - 7 < first ? before - 7 : first;
            end = before + p.staged.height > end ? before + p.staged.height : end;
            groups = has > groups ? has : groups;
        }
        groups = groups < ROW_GROUPS ? groups : ROW_GROUPS;
        first = first > 0 ? first : 0;
        end = end < R + 8 * (groups - 1) ? end : R + 8 * (groups - 1);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            const Half& at = lane / 8 % 2 ? halves[2 * m + 1] : halves[2 * m];
            rows[m] = planes + at.image * p.staged.plane_bytes() +
                      (at.row - p.pad_top - begin + lane % 8) * p.staged.row_bytes + p.window +
                      at.col * (int)sizeof(elem_t) + lane / 16 * hc::toeplitz::GROUP_BYTES;
        }
        Sums sums;
#pragma unroll
        for (int i = 0; i < M_TILES * ROW_GROUPS * N_TILES * 4; ++i) (&sums[0][0][0][0])[i] = output.bias;
        multiply_half_tiles(sums, bands, rows, p.staged.row_bytes, first, end, groups);
        const bool again = output.suspect || !finite(sums);
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            const Half& at = halves[i];
            if (!at.has || image + at.image >= p.staged.images) continue;
            if (again) output.sum_half_again(p, sums, i / 2, i % 2, at, image);
            output.store(p, sums, i / 2, i % 2, at, image, end_row);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_toeplitz(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    __shared__ Band::Table table;
    const int channel = blockIdx.x % p.partition.channels, first = blockIdx.x / p.partition.channels;
    const hc::toeplitz::Copier<elem_t, COPY_BYTES, THREADS> copier(p.staged, p.in, channel / MULTIPLIER);
    hc::strips::Ring<BUFFERS> ring(p.partition, dynamic_smem, first);
    const auto copy = [&](char* buffer, int images, int strip) {
        copier.template copy<IMAGES>(p.staged, buffer, images * IMAGES, first_row(p, strip));
    };
    hc::toeplitz::clear<THREADS>(dynamic_smem, BUFFERS * p.partition.buffer_bytes);
    __syncthreads();
    ring.fill(copy);
    const elem_t* const filter = hc::filter_of(p, channel);
    const bool finite = table.template load<THREADS>([&](int r, int s) { return hc::tap(p, filter, r, s); });
    const bool suspect = __syncthreads_or(!finite);
    const Band bands(table);
    const Output output = {filter, channel, HAS_BIAS ? hc::to_acc(p.bias[channel]) : 0.f, suspect};
    for (int round = first; ring.has(); ring.advance(), ++round) {
        ring.next_buffer(copy);
        if constexpr (sizeof(elem_t) == 4) {
            copier.template settle<IMAGES>(p.staged, const_cast<char*>(ring.buffer()));
            __syncthreads();
        }
        convolve(p, bands, output, ring.unit, round, ring.buffer());
    }
}
