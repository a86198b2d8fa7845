// depthwise_pairs_wgrad: the filter gradient of depthwise layers in 16-bit channels_last on Hopper's tensor cores, by
// pairs of channels, as partial sums.
//
//   partials[part][c, r, s] = sum over pixels (n, p, q) of dy[n, c, p, q] * x[n, c, p + r - pad_top, q + s - pad_left]
//
// Where channels are neighbours, a 32-bit word is a pair of channels of one pixel. A patch is 4 rows x 2 columns of dy,
// and its window of x is cut into fragments of eight pixels. mma.sync multiplies eight patches at once:
//
//   d[(c, a)][b] += sum over patches and both channels c' of (c == c' ? dy[patch, pixel a][c'] : 0) * x[patch, pixel b of the fragment][c']
//
// What belongs to tap (r, s) is where b lies (r, s) behind a. All patches of a filter go into the same sums.
//
// The copy engine brings bands of eight rows; the eight patches are four beside each other, and the four below. A
// block keeps its channels and marches down; a band of x meets the dy of the same band and, as windows are higher than
// patches, of the one before. So nothing is read twice but the columns between strips.
//
// The engine fills what lies outside with zeros, and the other channel counts as zero. A zero times an infinity is a
// NaN that does not belong into the sum: a tap whose sum is not finite is summed once more, over its pixels alone.
// Budget: 16 * ROW_FRAGS * FRAGS registers for sums; rings of bands in shared memory, in the end the sums of all warps.
#include "depthwise/march_row.cuh"
#include "pipeline.cuh"
#include "products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/tensor_map.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others are integers.
//   R S                    filter taps
//   EIGHTS                 of channels, that a block has
//   COLS                   of a strip of dy, a multiple of 8
//   FRAG_COLS              columns of a fragment of x: 2, 4 or 8
//   COL_WARPS UNIT_WARPS   warps that share eight channels: the fragments beside each other, the units of a strip
//   X_STAGES DY_STAGES     bands in the rings
using hc::i64;
using elem_t = ELEM;
using hc::ptx::u64;

constexpr int LANES = 32;
constexpr int PATCH_ROWS = 4, PATCH_COLS = 2, PATCH = PATCH_ROWS * PATCH_COLS;
constexpr int BAND_ROWS = 2 * PATCH_ROWS, UNIT_COLS = 4 * PATCH_COLS;  // a unit: the eight patches of a product
constexpr int FRAG_ROWS = PATCH / FRAG_COLS;
constexpr int STEPS = PATCH_ROWS / FRAG_ROWS;  // fragments below each other in as many rows as a patch has
constexpr int ROW_FRAGS = (PATCH_ROWS + R - 1 + FRAG_ROWS - 1) / FRAG_ROWS;  // of a window
constexpr int COL_FRAGS = (PATCH_COLS + S - 1 + FRAG_COLS - 1) / FRAG_COLS;
constexpr int FRAGS = COL_FRAGS / COL_WARPS;             // beside each other, of a warp
constexpr int EARLIER = (ROW_FRAGS - 1) / STEPS;         // patches above its own that rows of x belong to
constexpr int EXTRA = EARLIER > 0;                       // bands of x behind the last one of dy
constexpr int X_COLS = COLS - PATCH_COLS + COL_FRAGS * FRAG_COLS;
constexpr int CHANNELS = 8 * EIGHTS, EIGHT_BYTES = 16, PAIRS = 4;
constexpr int PIXEL_BYTES = (EIGHTS | 1) * EIGHT_BYTES;  // odd: eight neighbouring pixels lie in different banks
constexpr int X_BYTES = BAND_ROWS * X_COLS * PIXEL_BYTES, DY_BYTES = BAND_ROWS * COLS * PIXEL_BYTES;
constexpr int BARRIER_BYTES = (8 * (2 * X_STAGES + DY_STAGES) + 127) / 128 * 128;
constexpr int WARPS = EIGHTS * COL_WARPS * UNIT_WARPS, THREADS = LANES * (WARPS + 1);

static_assert(sizeof(elem_t) == 2, "a word is a pair of channels");
static_assert(COLS % UNIT_COLS == 0, "a strip is whole units");
static_assert(COL_FRAGS % COL_WARPS == 0, "warps share fragments evenly");
static_assert(EARLIER <= 2, "a band of x meets the band of dy before its own");

// How dy is cut: images, strips of columns and bands of each channel block; of all bands each block takes a share.
struct Cut {
    int channel_blocks, images, strips, bands;  // bands: of a strip
    int share, longer;                          // bands of a block; blocks that have one more
};

struct Params {
    hc::TensorMap x_map, dy_map;  // (channel, channel block, column, row, image)
    const elem_t *x, *dy;
    float* partials;                         // [part][C][R][S]
    i64 x_n, x_h, x_w, dy_n, dy_h, dy_w;     // strides in elements
    Cut cut;
    int h, w, p, q, pad_top, pad_left;
};

// Neighbouring bands of one strip.
struct Run {
    int image, strip, first, bands;
};

struct Walk {
    int part, channel_block;
    int at, end;  // bands

    __device__ __forceinline__ explicit Walk(const Cut& cut) {
        part = blockIdx.x / (unsigned)cut.channel_blocks, channel_block = blockIdx.x - part * cut.channel_blocks;
        at = part * cut.share + min(part, cut.longer);
        end = at + cut.share + (part < cut.longer);
    }

    __device__ __forceinline__ bool next(const Cut& cut, Run& run) {
        if (at >= end) return false;
        const int column = at / cut.bands;
        run.image = column / cut.strips, run.strip = column - run.image * cut.strips;
        run.first = at - column * cut.bands, run.bands = min((column + 1) * cut.bands, end) - at;
        at += run.bands;
        return true;
    }
};

struct Smem {
    u64 *full, *x_empty, *dy_empty;  // full: both bands have landed
    char *x, *dy;

    __device__ __forceinline__ explicit Smem(char* smem) {
        full = reinterpret_cast<u64*>(smem), x_empty = full + X_STAGES, dy_empty = x_empty + X_STAGES;
        x = smem + BARRIER_BYTES, dy = x + X_STAGES * X_BYTES;
    }
};

__device__ __forceinline__ void begin(const Smem& smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES; ++i) {
            hc::ptx::mbarrier_init(&smem.full[i], 1);
            hc::ptx::mbarrier_init(&smem.x_empty[i], WARPS);
        }
        for (int i = 0; i < DY_STAGES; ++i) hc::ptx::mbarrier_init(&smem.dy_empty[i], WARPS);
        hc::ptx::fence_mbarrier_init();
    }
    __syncthreads();
}

// ---- The thread that asks for bands ----

__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    Walk walk(p.cut);
    hc::Cursor x, dy;
    Run run;
    while (walk.next(p.cut, run))
        for (int band = 0; band < run.bands + EXTRA; ++band, x.advance(X_STAGES)) {
            const int row = (run.first + band) * BAND_ROWS, col = run.strip * COLS;
            hc::wait(&smem.x_empty[x.index], x.parity ^ 1);
            u64* const full = &smem.full[x.index];
            hc::ptx::mbarrier_arrive_expect_tx(full, X_BYTES + (band < run.bands ? DY_BYTES : 0));
            hc::ptx::cp_async_bulk_tensor_5d_shared_global(smem.x + x.index * X_BYTES, &p.x_map, full, 0,
                                                           walk.channel_block, col - p.pad_left, row - p.pad_top,
                                                           run.image);
            if (band >= run.bands) continue;
            hc::wait(&smem.dy_empty[dy.index], dy.parity ^ 1);
            hc::ptx::cp_async_bulk_tensor_5d_shared_global(smem.dy + dy.index * DY_BYTES, &p.dy_map, full, 0,
                                                           walk.channel_block, col, row, run.image);
            dy.advance(DY_STAGES);
        }
}

// ---- Warps that multiply ----

// A warp's channels, its first column of fragments, its first unit.
struct Place {
    int eight, frag, unit;

    __device__ __forceinline__ Place() {
        const int warp = threadIdx.x / LANES, rest = warp / EIGHTS;
        eight = warp % EIGHTS, frag = rest % COL_WARPS * FRAGS, unit = rest / COL_WARPS;
    }
};

using Sums = float[ROW_FRAGS][FRAGS][PAIRS][4];
using Words = unsigned[PAIRS];  // eight channels of a pixel

// `dy`: of the units's patches of this band and of the one before, or null: none.
__device__ __forceinline__ void load_patches(Words (&words)[EARLIER + 2], const char* dy, const char* dy_before) {
#pragma unroll
    for (int i = 0; i < EARLIER + 2; ++i) {
        const char* const band = i < 2 ? dy : dy_before;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) words[i][pair] = 0;
        if (band) hc::march::load_words<EIGHT_BYTES>(words[i], band + (1 - i % 2) * (PATCH_ROWS * COLS * PIXEL_BYTES));
    }
}

// Of patches i of the list above each other: the lower ones are the second half of k.
__device__ __forceinline__ void multiply_pair(float (&sums)[4], unsigned upper, unsigned lower, unsigned x_upper,
                                              unsigned x_lower) {
    constexpr unsigned FIRST = 0x0000ffffu, SECOND = 0xffff0000u;
    hc::mma(sums, {upper & FIRST, upper & SECOND, lower & FIRST, lower & SECOND}, {x_upper, x_lower}, elem_t{});
}

__device__ __forceinline__ void multiply(Sums& sums, const char* x, const char* dy, const char* dy_before) {
    Words patches[EARLIER + 2];  // from the lowest one upwards
    load_patches(patches, dy, dy_before);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int frag = 0; frag < FRAGS; ++frag) {
            Words upper, lower;
            const char* const at = x + (step * FRAG_ROWS * X_COLS + frag * FRAG_COLS) * PIXEL_BYTES;
            hc::march::load_words<EIGHT_BYTES>(upper, at);
            hc::march::load_words<EIGHT_BYTES>(lower, at + PATCH_ROWS * X_COLS * PIXEL_BYTES);
#pragma unroll
            for (int i = 0; i <= EARLIER; ++i) {
                const int row = i * STEPS + step;
                if (row >= ROW_FRAGS) continue;
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair)
                    multiply_pair(sums[row][frag][pair], patches[i + 1][pair], patches[i][pair], upper[pair],
                                  lower[pair]);
            }
        }
}

__device__ __forceinline__ void sum_runs(Sums& sums, const Params& p, const Smem& smem) {
    const Place place;
    const int lane = threadIdx.x % LANES, patch_col = lane % 4 * PATCH_COLS, pixel = lane / 4;
    const int x_place = (pixel / FRAG_COLS * X_COLS + patch_col + place.frag * FRAG_COLS + pixel % FRAG_COLS) *
                            PIXEL_BYTES + place.eight * EIGHT_BYTES;
    const int dy_place = (pixel / PATCH_COLS * COLS + patch_col + pixel % PATCH_COLS) * PIXEL_BYTES +
                         place.eight * EIGHT_BYTES;
    Walk walk(p.cut);
    hc::Cursor x_at, dy_at;
    Run run;
    while (walk.next(p.cut, run)) {
        const int units = min(COLS / UNIT_COLS, (p.q - run.strip * COLS + UNIT_COLS - 1) / UNIT_COLS);
        int before = 0;  // stage of dy of the band before
        for (int band = 0; band < run.bands + EXTRA; ++band, x_at.advance(X_STAGES)) {
            const char* const x = smem.x + x_at.index * X_BYTES + x_place;
            const char* const dy = smem.dy + dy_at.index * DY_BYTES + dy_place;
            const char* const dy_before = smem.dy + before * DY_BYTES + dy_place;
            hc::wait(&smem.full[x_at.index], x_at.parity);
#pragma unroll 1
            for (int unit = place.unit; unit < units; unit += UNIT_WARPS) {
                const int offset = unit * UNIT_COLS * PIXEL_BYTES;
                multiply(sums, x + offset, band < run.bands ? dy + offset : nullptr,
                         band > 0 ? dy_before + offset : nullptr);
            }
            hc::ptx::fence_proxy_async_shared();  // before the copy engine writes here again
            hc::arrive_warp(&smem.x_empty[x_at.index]);
            if (!EXTRA) hc::arrive_warp(&smem.dy_empty[dy_at.index]);
            if (EXTRA && band > 0) hc::arrive_warp(&smem.dy_empty[before]);
            before = dy_at.index;
            if (band < run.bands) dy_at.advance(DY_STAGES);
        }
    }
}

// ---- The sums of a block ----

constexpr int WARP_SUMS = ROW_FRAGS * FRAGS * PAIRS * 4 * LANES;

__device__ __forceinline__ void write_sums(float* to, const Sums& sums) {
    to += threadIdx.x / LANES * WARP_SUMS + threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < ROW_FRAGS * FRAGS * PAIRS * 4; ++i)
        to[i * LANES] = sums[i / (4 * PAIRS * FRAGS)][i / (4 * PAIRS) % FRAGS][i / 4 % PAIRS][i % 4];
}

// A tap's sum over the pixels of a patch and the warps that share units.
__device__ __forceinline__ float tap_sum(const float* sums, int channel, int r, int s) {
    float sum = 0;
    for (int unit = 0; unit < UNIT_WARPS; ++unit)
#pragma unroll
        for (int a = 0; a < PATCH; ++a) {
            const int row = r + a / PATCH_COLS, col = s + a % PATCH_COLS;  // of the window
            const int b = row % FRAG_ROWS * FRAG_COLS + col % FRAG_COLS, frag = col / FRAG_COLS;
            const int warp = (unit * COL_WARPS + frag / FRAGS) * EIGHTS + channel / 8;
            const int word = (row / FRAG_ROWS * FRAGS + frag % FRAGS) * PAIRS + channel % 8 / 2;
            const int e = channel % 2 * 2 + b % 2, lane = a * 4 + b / 2;
            sum += sums[warp * WARP_SUMS + (word * 4 + e) * LANES + lane];
        }
    return sum;
}

// The same for the whole warp, of products that belong into it only.
__device__ __forceinline__ float sum_again(const Params& p, int channel, int r, int s) {
    Walk walk(p.cut);
    Run run;
    float sum = 0;
    channel += walk.channel_block * CHANNELS;
    while (walk.next(p.cut, run)) {
        const elem_t *x = p.x + run.image * p.x_n + channel, *dy = p.dy + run.image * p.dy_n + channel;
        const int last = min(p.p, (run.first + run.bands) * BAND_ROWS), end = min(p.q, (run.strip + 1) * COLS);
        for (int row = run.first * BAND_ROWS; row < last; ++row)
            for (int col = run.strip * COLS + threadIdx.x % LANES; col < end; col += LANES) {
                const int h = row + r - p.pad_top, w = col + s - p.pad_left;
                const bool inside = (unsigned)h < (unsigned)p.h && (unsigned)w < (unsigned)p.w;
                sum += hc::to_acc(dy[row * p.dy_h + col * p.dy_w]) *
                       (inside ? hc::to_acc(x[h * p.x_h + w * p.x_w]) : 0.f);
            }
    }
#pragma unroll
    for (int far = LANES / 2; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
    return sum;
}

__device__ __forceinline__ void write_partials(const Params& p, const float* sums) {
    constexpr int TAPS = R * S, COUNT = CHANNELS * TAPS;
    const Walk walk(p.cut);
    const int lane = threadIdx.x % LANES;
    float* const partials = p.partials + (walk.part * (i64)p.cut.channel_blocks + walk.channel_block) * COUNT;
    for (int first = threadIdx.x - lane; first < COUNT; first += THREADS) {
        const int i = first + lane;
        float sum = i < COUNT ? tap_sum(sums, i / TAPS, i % TAPS / S, i % TAPS % S) : 0.f;
        unsigned left = __ballot_sync(0xffffffffu, sum * 0.f != 0.f);
        for (; left; left &= left - 1) {
            const int other = __ffs(left) - 1, at = first + other;
            const float again = sum_again(p, at / TAPS, at % TAPS / S, at % TAPS % S);
            if (lane == other) sum = again;
        }
        if (i < COUNT) partials[i] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_pairs_wgrad(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char dynamic_smem[];
    const Smem smem(dynamic_smem);
    float* const all_sums = reinterpret_cast<float*>(smem.x);
    begin(smem);
    if (threadIdx.x / LANES < WARPS) {
        Sums sums = {};
        sum_runs(sums, p, smem);
        hc::ptx::bar_sync(1, LANES * WARPS);  // the rings have been read
        write_sums(all_sums, sums);
    } else if (hc::ptx::elect_sync()) {
        produce(p, smem);
    }
    __syncthreads();
    write_partials(p, all_sums);
}
