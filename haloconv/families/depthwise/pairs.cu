// depthwise_pairs: fprop and dgrad of depthwise layers in nhwc, 16 bits, stride 1, on tensor cores, from Hopper on.
//
//   y[pixel, c] = sum over (r, s) of w[c, r, s] * x[pixel at tap (r, s), c]        dgrad: the flipped filter
//
// mma.sync multiplies 2 channels by the 8 pixels p of a patch (rows) with 8 patches beside each other (columns), over 8
// places q of a patch's window by 2 channels (k):
//   A[(c, p)][(q, d)] = w[c][q - p] if c = d and q - p is a tap, else 0        B[(q, d)][patch] = x[patch + q][d]
//
// The trick: in nhwc a register of B is a word as it lies in memory, so nothing is transposed or moved. A stays in
// registers: a block keeps to one slab of channels and marches down, and a row of x, read once from shared memory, goes
// into the sums of the LIVE rows of patches whose windows it lies in. TMA brings bands of x, with zeros for
// the padding, and takes those of y away. A zero of A times an infinity is a NaN that does not belong into the sum:
// sums that are not finite are summed once more over the taps alone.
// Budget: a warp has 4 * PAIRS registers of A for each product of a window, 4 * PAIRS * TILES * LIVE sums; a ring of
// stages of BAND rows of x, and three of y, in shared memory.
#include "families/depthwise/finish.cuh"
#include "families/depthwise/pairs.cuh"
#include "kernels/ptx/register.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others are integers.
//   R S                filter taps
//   PATCH_ROWS         rows of a patch: 1, 2, 4 or 8 of its 8 pixels
//   CHUNKS             8 channels each, of a slab
//   SWIZZLE            bytes, of a pixel of the slab in shared memory; 0: none
//   PAIRS              pairs of channels of a warp, 4 or less: part of a chunk
//   TILES              products beside each other in a row of patches
//   BAND               rows of a band and of a stage
//   REGISTERS          of threads that multiply, which take those that others need not have; 0: as the compiler says
//   HAS_BIAS           adds bias[c]
//   AFFINE ACTIVATION  of an epilogue of fprop, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh)
namespace hc::pairs {

using elem_t = ELEM;

constexpr int PATCH_COLS = 8 / PATCH_ROWS;
constexpr int GROUPS = (PATCH_COLS + S - 1 + 3) / 4;  // of 4 neighbouring columns, in a row of a window
constexpr int WINDOW_ROWS = PATCH_ROWS + R - 1;
constexpr int LIVE = (WINDOW_ROWS + PATCH_ROWS - 1) / PATCH_ROWS;
constexpr int HALVES = PATCH_ROWS * GROUPS, PRODUCTS = (HALVES + 1) / 2;  // of PATCH_ROWS rows of x; k has two halves
constexpr int STEPS = BAND / PATCH_ROWS;                                  // rows of patches in a band
constexpr int WARMUP = (LIVE - 1 + STEPS - 1) / STEPS;  // bands of x that a run begins with before its first outputs
constexpr int WARPS = CHUNKS * CHUNK_PAIRS / PAIRS;     // that multiply
constexpr int THREADS = 32 * (REGISTERS > 0 ? WARPS + 4 : WARPS + 2);
constexpr int SENDING_REGISTERS = 24;
constexpr int SLAB_CHANNELS = CHUNKS * CHUNK_CHANNELS, PIXEL_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int Y_BUFFERS = 3;

static_assert(sizeof(elem_t) == 2, "a word is two channels");
static_assert(BAND % PATCH_ROWS == 0 && CHUNK_PAIRS % PAIRS == 0, "bands are whole patches, warps share chunks evenly");
static_assert(REGISTERS == 0 || WARPS % 4 == 0, "warpgroups change their registers");

struct Params {
    TensorMap x_map, y_map;
    const elem_t *x, *w, *bias;
    elem_t* y;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as y
#endif
    i64 w_first, w_c, w_r, w_s;  // the first tap's place; strides; in elements
    i64 x_n, x_h, x_w;           // strides in elements
    Cut cut;
    int channels, rows, cols, top, left;  // of x; padding
    int lead;                             // rows between the first stage of a run and its first window
    int strip_cols, x_cols, y_cols;       // of a strip of y; of rows of x and of y in shared memory
    int stages, x_bytes, y_bytes;         // buffers of x; of a buffer
#ifdef AFFINE_AND_RESIDUAL
    int y_rows, y_width;  // of an image of y
#endif
};

struct Smem {
    char *x, *y;
    ptx::u64 *full, *empty, *y_full, *y_empty;

    __device__ __forceinline__ Smem(const Params& p, char* smem) {
        x = smem, y = x + p.stages * p.x_bytes;
        full = reinterpret_cast<ptx::u64*>(y + Y_BUFFERS * p.y_bytes), empty = full + p.stages;
        y_full = empty + p.stages, y_empty = y_full + Y_BUFFERS;
    }
};

__device__ __forceinline__ void begin(const Params& p, const Smem& smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            ptx::mbarrier_init(&smem.full[i], 1);
            ptx::mbarrier_init(&smem.empty[i], WARPS);
        }
        for (int i = 0; i < Y_BUFFERS; ++i) {
            ptx::mbarrier_init(&smem.y_full[i], WARPS);
            ptx::mbarrier_init(&smem.y_empty[i], 1);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
}

// The first row of x in stage `i` of a run.
__device__ __forceinline__ int row_of_stage(const Params& p, const Run& run, int i) {
    return (run.first + i) * BAND - p.top - p.lead;
}

// A stage of padding alone is neither brought nor multiplied.
__device__ __forceinline__ bool is_padding(const Params& p, int row) { return row >= p.rows || row + BAND <= 0; }

// ---- one thread that asks for bands of x, one that sends bands of y ----

__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    Walk walk(p.cut);
    const int first_channel = walk.slab * SLAB_CHANNELS;
    Cursor at;
    Run run;
    while (walk.next(p.cut, run))
        for (int i = 0; i < run.bands + WARMUP; ++i, at.advance(p.stages)) {
            const int row = row_of_stage(p, run, i), col = run.strip * p.strip_cols - p.left;
            ptx::u64* const full = &smem.full[at.index];
            wait(&smem.empty[at.index], at.parity ^ 1);
            if (is_padding(p, row)) {
                ptx::mbarrier_arrive(full);
                continue;
            }
            ptx::mbarrier_arrive_expect_tx(full, BAND * p.x_cols * PIXEL_BYTES);
            ptx::cp_async_bulk_tensor_4d_shared_global(smem.x + at.index * p.x_bytes, &p.x_map, full, first_channel,
                                                       col, row, run.image);
        }
}

// Rows go one by one: in shared memory they begin at multiples of 8 columns.
__device__ __forceinline__ void send(const Params& p, const Smem& smem) {
    Walk walk(p.cut);
    Cursor at;
    Run run;
    while (walk.next(p.cut, run))
        for (int band = 0; band < run.bands; ++band, at.advance(Y_BUFFERS)) {
            wait(&smem.y_full[at.index], at.parity);
            for (int row = 0; row < BAND; ++row)
                ptx::cp_async_bulk_tensor_4d_global_shared(
                    &p.y_map, smem.y + at.index * p.y_bytes + row * p.y_cols * PIXEL_BYTES, walk.slab * SLAB_CHANNELS,
                    run.strip * p.strip_cols, (run.first + band) * BAND + row, run.image);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read<0>();
            ptx::mbarrier_arrive(&smem.y_empty[at.index]);
        }
    ptx::cp_async_bulk_wait_group<0>();
}

// ---- warps that multiply ----

// Which patch of a row of eight is column n of a product: neighbouring lanes read, and write, different banks.
__device__ __forceinline__ constexpr int patch_of(int n) {
    constexpr int SWAP = PATCH_COLS == 2 ? 2 : PATCH_COLS == 4 ? 1 : 0;
    return n % 2 ? 4 + (n / 2 ^ SWAP) : n / 2;
}

// What a warp multiplies of a pixel.
struct alignas(4 * PAIRS) Words {
    unsigned of[PAIRS];
};

// A warp's channels.
struct Place {
    int chunk, byte, channel;  // of the slab; in the chunk; of the tensor

    __device__ __forceinline__ explicit Place(int slab) {
        const int words = threadIdx.x / 32 * PAIRS;
        chunk = words / CHUNK_PAIRS, byte = words % CHUNK_PAIRS * 4, channel = slab * SLAB_CHANNELS + words * 2;
    }
    __device__ __forceinline__ int in_row(int col) const {
        return place_in_row<PIXEL_BYTES, SWIZZLE>(col, chunk) + byte;
    }
};

// A lane's pixel of the patch in column n of product t: its column of the strip.
__device__ __forceinline__ int out_col(int t, int n) {
    return (t * 8 + patch_of(n)) * PATCH_COLS + threadIdx.x % 32 / 4 % PATCH_COLS;
}

// Whether product i of a row of patches of x meets the outputs whose window began `age` rows of patches before.
__device__ __forceinline__ constexpr bool meets(int age, int product) {
    return age * HALVES + 2 * product < WINDOW_ROWS * GROUPS;
}

// A, and what sums begin with. A lane of A has place lane % 4 (and + 4) of a product for pixel lane / 4.
struct Taps {
    unsigned of[LIVE][PRODUCTS][PAIRS][4];
    float bias[PAIRS][4];

    // `filter` is the warp's own memory.
    __device__ __forceinline__ Taps(const Params& p, const Place& place, unsigned short* filter) {
        const int lane = threadIdx.x % 32, pixel = lane / 4;
        for (int i = lane; i < 2 * PAIRS * R * S; i += 32) {
            const int c = place.channel + i / (R * S), tap = i % (R * S);
            filter[i] = c < p.channels ? p.w[p.w_first + c * p.w_c + tap / S * p.w_r + tap % S * p.w_s].bits : 0;
        }
        __syncwarp();
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
            for (int age = 0; age < LIVE; ++age)
#pragma unroll
                for (int half = 0; half < 2 * PRODUCTS; ++half) {
                    const int r = age * PATCH_ROWS + half / GROUPS - pixel / PATCH_COLS;
                    const int s = half % GROUPS * 4 + lane % 4 - pixel % PATCH_COLS;
                    const bool tap = half < HALVES && r >= 0 && r < R && s >= 0 && s < S;
                    const unsigned short* at = filter + 2 * pair * R * S + r * S + s;
                    of[age][half / 2][pair][half % 2 * 2] = tap ? at[0] : 0;
                    of[age][half / 2][pair][half % 2 * 2 + 1] = tap ? unsigned(at[R * S]) << 16 : 0;
                }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int c = place.channel + 2 * pair + e / 2;
                bias[pair][e] = HAS_BIAS && c < p.channels ? to_acc(p.bias[c]) : 0.f;
            }
        }
    }
};

// The sums of a row of patches: elements 0 and 1 are the pair's first channel in patches 2 * (lane % 4) and the next,
// 2 and 3 the second channel there.
using Sums = float[TILES][PAIRS][4];

// Down by a row of patches: the source and the result of a product may be different registers, so this costs nothing.
__device__ __forceinline__ void move_on(Sums (&sums)[LIVE], const Taps& taps) {
#pragma unroll
    for (int age = LIVE - 1; age >= 0; --age)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sums[age][t][pair][e] = age > 0 ? sums[age > 0 ? age - 1 : 0][t][pair][e] : taps.bias[pair][e];
}

// PATCH_ROWS rows of x, from `x` on; `places` are the bytes in a row of a lane's words of B.
__device__ __forceinline__ void multiply(Sums (&sums)[LIVE], const Taps& taps, const char* x, int row_bytes,
                                         const int (&places)[TILES][GROUPS]) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            Words b[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int half = 2 * i + h < HALVES ? 2 * i + h : 2 * i;
                b[h] = *reinterpret_cast<const Words*>(x + half / GROUPS * row_bytes + places[t][half % GROUPS]);
            }
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
                for (int age = LIVE - 1; age >= 0; --age)
                    if (meets(age, i))
                        mma(sums[age][t][pair], taps.of[age][i][pair], {b[0].of[pair], b[1].of[pair]}, elem_t{});
        }
}

__device__ __forceinline__ bool finite(const Sums& sums) {
    float zeros[4] = {};  // chains of additions side by side
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
            for (int e = 0; e < 4; ++e) zeros[e] += sums[t][pair][e] * 0.f;
    return zeros[0] + zeros[1] + (zeros[2] + zeros[3]) == 0.f;
}

// The residual from a channel of a pixel of y on; zeros where no output is.
template <class T>
__device__ __forceinline__ T residual_at(const Params& p, int channel, int image, int row, int col) {
    T found = {};
#ifdef AFFINE_AND_RESIDUAL
    if (row < p.y_rows && col < p.y_width && channel < p.channels)
        found = *reinterpret_cast<const T*>(p.residual +
                                            (((i64)image * p.y_rows + row) * p.y_width + col) * p.channels + channel);
#endif
    return found;
}

// Writes a row of patches; `places` are bytes of the lane's pixels, -1 for none. They are in row `row` of y, of a strip
// from column `col` on.
__device__ __forceinline__ void write(const Sums& sums, char* y, const int (&places)[TILES][2], const Params& p,
                                      const Place& place, int image, int row, int col) {
    Finish finish[2 * PAIRS];
#pragma unroll
    for (int c = 0; c < 2 * PAIRS; ++c)
        if (place.channel < p.channels) finish[c].load(p.bias, place.channel + c);
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int at = out_col(t, threadIdx.x % 4 * 2 + e);
            Words words = residual_at<Words>(p, place.channel, image, row, col + at);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                const elem_t low{(unsigned short)words.of[pair]}, high{(unsigned short)(words.of[pair] >> 16)};
                words.of[pair] = from_acc_pair<elem_t>(finish[2 * pair](sums[t][pair][e], to_acc(low)),
                                                       finish[2 * pair + 1](sums[t][pair][2 + e], to_acc(high)));
            }
            if (places[t][e] >= 0) *reinterpret_cast<Words*>(y + places[t][e]) = words;
        }
}

// Writes sums over the taps alone, from device memory. The lane's pixels are in row `row` of y; `y` is that row in
// shared memory, which begins with column `col`.
__device__ __forceinline__ void write_again(const Params& p, const Place& place, char* y, int image, int row, int col) {
#pragma unroll 1
    for (int i = 0; i < TILES * 2 * 2 * PAIRS; ++i) {
        const int channel = place.channel + i % (2 * PAIRS), patch = i / (2 * PAIRS);
        const int at = out_col(patch / 2, threadIdx.x % 4 * 2 + patch % 2);
        if (at >= p.strip_cols || channel >= p.channels) continue;
        float sum = HAS_BIAS ? to_acc(p.bias[channel]) : 0.f;
#pragma unroll 1
        for (int tap = 0; tap < R * S; ++tap) {
            const int r = tap / S, s = tap % S, x_row = row + r - p.top, x_col = col + at + s - p.left;
            if ((unsigned)x_row >= (unsigned)p.rows || (unsigned)x_col >= (unsigned)p.cols) continue;
            sum += to_acc(p.x[image * p.x_n + x_row * p.x_h + x_col * p.x_w + channel]) *
                   to_acc(p.w[p.w_first + channel * p.w_c + r * p.w_r + s * p.w_s]);
        }
        if constexpr (EPILOGUE) {
            Finish finish;
            finish.load(p.bias, channel);
            sum = finish(sum, to_acc(residual_at<elem_t>(p, channel, image, row, col + at)));
        }
        reinterpret_cast<elem_t*>(y + place.in_row(at))[i % (2 * PAIRS)] = from_acc<elem_t>(sum);
    }
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, unsigned short* filter) {
    const int lane = threadIdx.x % 32, patch_row = lane / 4 / PATCH_COLS;
    const int x_row = p.x_cols * PIXEL_BYTES, y_row = p.y_cols * PIXEL_BYTES;
    Walk walk(p.cut);
    const Place place(walk.slab);
    const Taps taps(p, place, filter);
    int x_places[TILES][GROUPS], y_places[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int behind = p.strip_cols - PATCH_COLS, col = (t * 8 + patch_of(lane / 4)) * PATCH_COLS;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)  // patches that there are none of read the last one's window
            x_places[t][g] = place.in_row((col < behind ? col : behind) + 4 * g + lane % 4);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int at = out_col(t, lane % 4 * 2 + e);
            y_places[t][e] = at < p.strip_cols ? patch_row * y_row + place.in_row(at) : -1;
        }
    }
    Sums sums[LIVE] = {};
    Cursor at, out;
    Run run;
    while (walk.next(p.cut, run))
        for (int i = 0; i < run.bands + WARMUP; ++i, at.advance(p.stages)) {
            const bool empty = is_padding(p, row_of_stage(p, run, i)), writes = i >= WARMUP;
            const char* const x = smem.x + at.index * p.x_bytes;
            char* const y = smem.y + out.index * p.y_bytes;
            wait(&smem.full[at.index], at.parity);
            if (writes) wait(&smem.y_empty[out.index], out.parity ^ 1);
#pragma unroll
            for (int row = 0; row < BAND; row += PATCH_ROWS) {
                move_on(sums, taps);
                if (!empty) multiply(sums, taps, x + row * x_row, x_row, x_places);
                if (!writes) continue;
                write(sums[LIVE - 1], y + row * y_row, y_places, p, place, run.image,
                      (run.first + i - WARMUP) * BAND + row + patch_row, run.strip * p.strip_cols);
                if (!finite(sums[LIVE - 1])) {
                    const int first = row + patch_row;
                    write_again(p, place, y + first * y_row, run.image, (run.first + i - WARMUP) * BAND + first,
                                run.strip * p.strip_cols);
                }
            }
            ptx::fence_proxy_async_shared();  // before TMA writes x, and before it reads y
            arrive_warp(&smem.empty[at.index]);
            if (!writes) continue;
            arrive_warp(&smem.y_full[out.index]);
            out.advance(Y_BUFFERS);
        }
}

}  // namespace hc::pairs

extern "C" __global__ void __launch_bounds__(hc::pairs::THREADS, 1)
    depthwise_pairs(const __grid_constant__ hc::pairs::Params p) {
    using namespace hc::pairs;
    extern __shared__ __align__(1024) char dynamic_smem[];
    __shared__ unsigned short filters[WARPS][2 * PAIRS * R * S];
    const Smem smem(p, dynamic_smem);
    begin(p, smem);
    const int warp = threadIdx.x / 32;
    if (warp < WARPS) {
        if constexpr (REGISTERS > 0) hc::ptx::setmaxnreg_inc<REGISTERS>();
        consume(p, smem, filters[warp]);
    } else {
        if constexpr (REGISTERS > 0) hc::ptx::setmaxnreg_dec<SENDING_REGISTERS>();
        if (warp == WARPS && hc::ptx::elect_sync()) produce(p, smem);
        if (warp == WARPS + 1 && hc::ptx::elect_sync()) send(p, smem);
    }
}
