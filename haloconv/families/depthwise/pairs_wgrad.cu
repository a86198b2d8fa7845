// depthwise_pairs_wgrad: the filter gradient of depthwise layers in 16-bit channels_last on Hopper's tensor cores.
//
//   partials[part][c, r, s] = sum over pixels (n, p, q) of dy[n, c, p, q] * x[n, c, p + r - pad_top, q + s - pad_left]
//
// Where channels are neighbours, a word is a pair of channels of one pixel. A patch is 4 rows x 2 columns of dy, its
// window of x is cut into fragments of eight pixels. mma.sync sums eight patches, and both channels c' of a word:
//
//   d[(c, a)][b] += sum of (c == c' ? dy[pixel a of a patch][c'] : 0) * x[pixel b of a fragment of its window][c']
//
// What belongs to tap (r, s) is where b lies (r, s) behind a. All patches of a filter go into the same sums. Warps copy
// bands of eight rows to rings in shared memory, with zeros outside the image, and blocks march down strips.
//
// A zero times an infinity, be it of the other channel or beside the image, is a NaN that does not belong into the sum:
// a tap whose sum is not finite is summed once more, over its pixels alone.
// Budget: 16 * ROW_FRAGS * COL_FRAGS registers for sums; rings of bands in shared memory, in the end all warps' sums.
#include "families/depthwise/march_row.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/warp_sum.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others are integers.
//   R S                    filter taps
//   EIGHTS                 of channels, that a block has
//   COLS                   of a strip of dy, a multiple of 8
//   FRAG_COLS              columns of a fragment of x: 2, 4 or 8
//   UNIT_WARPS             warps that share the units of a strip, for eight channels
//   LOADERS                warps that copy
//   STAGES                 bands in the ring of dy
using hc::i64;
using elem_t = ELEM;
using hc::ptx::u64;

constexpr int LANES = 32;
constexpr int PATCH_ROWS = 4, PATCH_COLS = 2, PATCH = PATCH_ROWS * PATCH_COLS;
constexpr int BAND_ROWS = 2 * PATCH_ROWS, UNIT_COLS = 4 * PATCH_COLS;  // a unit: the eight patches of a product
constexpr int FRAG_ROWS = PATCH / FRAG_COLS;
constexpr int ROW_FRAGS = (PATCH_ROWS + R - 1 + FRAG_ROWS - 1) / FRAG_ROWS;  // of a window
constexpr int COL_FRAGS = (PATCH_COLS + S - 1 + FRAG_COLS - 1) / FRAG_COLS;
constexpr int BELOW = PATCH_ROWS / FRAG_ROWS;  // fragments from a patch's window to that of the patch below
constexpr int UNIT_FRAGS = ROW_FRAGS + BELOW;  // below each other, of both windows
constexpr int BAND_FRAGS = BAND_ROWS / FRAG_ROWS;
constexpr int NEXT_ROWS = UNIT_FRAGS > BAND_FRAGS ? (UNIT_FRAGS - BAND_FRAGS) * FRAG_ROWS : 0;  // of the next band
constexpr int NEXT = NEXT_ROWS > 0;  // bands of x behind the last one of dy
constexpr int X_STAGES = STAGES + NEXT;
constexpr int X_COLS = COLS - PATCH_COLS + COL_FRAGS * FRAG_COLS;
constexpr int CHANNELS = 8 * EIGHTS, EIGHT_BYTES = 16, PAIRS = 4;
constexpr int PIXEL_BYTES = (EIGHTS | 1) * EIGHT_BYTES;  // odd: eight neighbouring pixels lie in different banks
constexpr int X_ROW_BYTES = X_COLS * PIXEL_BYTES, DY_ROW_BYTES = COLS * PIXEL_BYTES;
constexpr int X_BYTES = BAND_ROWS * X_ROW_BYTES, DY_BYTES = BAND_ROWS * DY_ROW_BYTES;
constexpr int BARRIER_BYTES = (8 * 2 * X_STAGES + 127) / 128 * 128;
constexpr int WARPS = EIGHTS * UNIT_WARPS, THREADS = LANES * (WARPS + LOADERS);

static_assert(sizeof(elem_t) == 2, "a word is a pair of channels");
static_assert(COLS % UNIT_COLS == 0, "a strip is whole units");
static_assert(NEXT_ROWS <= BAND_ROWS, "windows end in the next band");

// How dy is cut: of each channel block into images, strips of columns, and pieces of a strip. A piece is some bands. Of
// all pieces a block takes every so many-th: so blocks that run at a time read what lies beside each other.
struct Cut {
    int channel_blocks, parts;                       // parts: blocks of a channel block
    int images, strips, pieces, piece_bands, bands;  // bands: of a strip; its last piece may be shorter
    int strip_shift;                                 // 1 if a block would meet the same strip of each image
};

// Strides in elements.
struct Tensor {
    const elem_t* at;
    i64 n, h, w;
    int rows, cols;
};

struct Params {
    const elem_t *x, *dy;
    float* partials;                      // [part][channel block][R][S][channel]
    i64 x_n, x_h, x_w, dy_n, dy_h, dy_w;  // strides in elements
    Cut cut;
    int channels, h, w, p, q, pad_top, pad_left;
};

// Neighbouring bands of one strip.
struct Run {
    int image, strip, first, bands;
};

// The runs of a block.
struct Walk {
    int part, channel_block, round = 0;

    __device__ __forceinline__ explicit Walk(const Cut& cut) {
        part = blockIdx.x / (unsigned)cut.channel_blocks, channel_block = blockIdx.x - part * cut.channel_blocks;
    }

    __device__ __forceinline__ bool next(const Cut& cut, Run& run) {
        const int at = part + round * cut.parts, strips = at / cut.strips;
        run.image = strips / cut.pieces;
        if (run.image >= cut.images) return false;
        run.strip = (at + cut.strip_shift * round) % cut.strips;
        run.first = (strips - run.image * cut.pieces) * cut.piece_bands;
        run.bands = min(cut.piece_bands, cut.bands - run.first);
        ++round;
        return true;
    }
};

struct Smem {
    u64 *full, *empty;  // of a band of x, and of the band of dy that comes with it
    char *x, *dy;

    __device__ __forceinline__ explicit Smem(char* smem) {
        full = reinterpret_cast<u64*>(smem), empty = full + X_STAGES;
        x = smem + BARRIER_BYTES, dy = x + X_STAGES * X_BYTES;
    }
};

__device__ __forceinline__ void begin(const Smem& smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES; ++i) {
            hc::ptx::mbarrier_init(&smem.full[i], LANES * LOADERS);
            hc::ptx::mbarrier_init(&smem.empty[i], WARPS);
        }
    }
    __syncthreads();
}

// ---- Warps that copy ----

// `rows` rows of an image from (row, col) on, of a block's channels. What lies outside becomes zeros.
template <int WIDTH>
__device__ __forceinline__ void copy_band(char* to, const Tensor& from, int image, int row, int col, int rows,
                                          int channel, int channels) {
    const elem_t* const first = from.at + image * from.n + channel;
    for (int k = threadIdx.x - LANES * WARPS; k < WIDTH * EIGHTS; k += LANES * LOADERS) {
        const int at = k / EIGHTS, eight = k - at * EIGHTS;
        const bool here = (unsigned)(col + at) < (unsigned)from.cols && channel + eight * 8 < channels;
        const elem_t* const pixel = first + row * from.h + (col + at) * from.w + eight * 8;
        char* const place = to + at * PIXEL_BYTES + eight * EIGHT_BYTES;
#pragma unroll
        for (int i = 0; i < BAND_ROWS; ++i) {
            if (i >= rows) break;
            const bool inside = here && (unsigned)(row + i) < (unsigned)from.rows;
            hc::ptx::cp_async_16(place + i * (WIDTH * PIXEL_BYTES), inside ? pixel + i * from.h : first,
                                 inside ? EIGHT_BYTES : 0);
        }
    }
}

// A band of dy comes with the band of x below: then its windows are complete. Its stage was left together with that
// band's, as the ring of x is longer by what comes ahead.
__device__ __forceinline__ void copy(const Params& p, const Smem& smem) {
    const Tensor of_x{p.x, p.x_n, p.x_h, p.x_w, p.h, p.w}, of_dy{p.dy, p.dy_n, p.dy_h, p.dy_w, p.p, p.q};
    Walk walk(p.cut);
    hc::Cursor x, dy;
    Run run;
    const int channel = walk.channel_block * CHANNELS;
    while (walk.next(p.cut, run))
        for (int band = 0; band < run.bands + NEXT; ++band, x.advance(X_STAGES)) {
            const int row = (run.first + band) * BAND_ROWS, col = run.strip * COLS;
            hc::wait(&smem.empty[x.index], x.parity ^ 1);
            copy_band<X_COLS>(smem.x + x.index * X_BYTES, of_x, run.image, row - p.pad_top, col - p.pad_left,
                              band < run.bands ? BAND_ROWS : NEXT_ROWS, channel, p.channels);
            if (band >= NEXT) {
                copy_band<COLS>(smem.dy + dy.index * DY_BYTES, of_dy, run.image, row - NEXT * BAND_ROWS, col, BAND_ROWS,
                                channel, p.channels);
                dy.advance(STAGES);
            }
            hc::ptx::cp_async_mbarrier_arrive_noinc(&smem.full[x.index]);
        }
    hc::ptx::cp_async_commit_group();
    hc::ptx::cp_async_wait_group<0>();  // a thread that ends has nothing under way
}

// ---- Warps that multiply ----

// A warp's channels, its first unit.
struct Place {
    int eight, unit;

    __device__ __forceinline__ Place() {
        const int warp = threadIdx.x / LANES;
        eight = warp % EIGHTS, unit = warp / EIGHTS;
    }
};

using Sums = float[ROW_FRAGS][COL_FRAGS][PAIRS][4];
using Words = unsigned[PAIRS];  // eight channels of a pixel

// The patches `upper` and those below them, `lower`, which are the second half of k.
__device__ __forceinline__ void multiply_pair(float (&sums)[4], unsigned upper, unsigned lower, unsigned x_upper,
                                              unsigned x_lower) {
    constexpr unsigned FIRST = 0x0000ffffu, SECOND = 0xffff0000u;
    hc::mma(sums, {upper & FIRST, upper & SECOND, lower & FIRST, lower & SECOND}, {x_upper, x_lower}, elem_t{});
}

// One unit: where the lane reads in a band of dy, in the band of x, and in the next one.
__device__ __forceinline__ void multiply(Sums& sums, const char* dy, const char* x, const char* x_next) {
    Words upper, lower;
    hc::march::load_words<EIGHT_BYTES>(upper, dy);
    hc::march::load_words<EIGHT_BYTES>(lower, dy + PATCH_ROWS * DY_ROW_BYTES);
#pragma unroll
    for (int frag = 0; frag < COL_FRAGS; ++frag) {
        Words window[UNIT_FRAGS];
#pragma unroll
        for (int i = 0; i < UNIT_FRAGS; ++i) {
            const char* const band = i < BAND_FRAGS ? x : x_next;
            const int row = i % BAND_FRAGS * FRAG_ROWS;
            hc::march::load_words<EIGHT_BYTES>(window[i], band + row * X_ROW_BYTES + frag * FRAG_COLS * PIXEL_BYTES);
        }
#pragma unroll
        for (int i = 0; i < ROW_FRAGS; ++i)
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
                multiply_pair(sums[i][frag][pair], upper[pair], lower[pair], window[i][pair], window[i + BELOW][pair]);
    }
}

__device__ __forceinline__ void sum_runs(Sums& sums, const Params& p, const Smem& smem) {
    const Place place;
    const int lane = threadIdx.x % LANES, patch_col = lane % 4 * PATCH_COLS, pixel = lane / 4;
    const int first = place.unit * UNIT_COLS * PIXEL_BYTES + place.eight * EIGHT_BYTES;
    const int x_col = patch_col + pixel % FRAG_COLS, dy_col = patch_col + pixel % PATCH_COLS;
    const char* const x = smem.x + first + pixel / FRAG_COLS * X_ROW_BYTES + x_col * PIXEL_BYTES;
    const char* const dy = smem.dy + first + pixel / PATCH_COLS * DY_ROW_BYTES + dy_col * PIXEL_BYTES;
    Walk walk(p.cut);
    hc::Cursor x_at, dy_at;
    Run run;
    while (walk.next(p.cut, run)) {
        const int units = min(COLS, p.q - run.strip * COLS + UNIT_COLS - 1) / UNIT_COLS;
        for (int band = 0; band < run.bands; ++band, dy_at.advance(STAGES)) {
            hc::Cursor next = x_at;
            next.advance(X_STAGES);
            hc::wait(&smem.full[x_at.index], x_at.parity);
            if (NEXT) hc::wait(&smem.full[next.index], next.parity);
            const int dy_from = dy_at.index * DY_BYTES, x_from = x_at.index * X_BYTES, x_next = next.index * X_BYTES;
#pragma unroll 1
            for (int unit = place.unit, offset = 0; unit < units;
                 unit += UNIT_WARPS, offset += UNIT_WARPS * UNIT_COLS * PIXEL_BYTES)
                multiply(sums, dy + dy_from + offset, x + x_from + offset, x + x_next + offset);
            hc::arrive_warp(&smem.empty[x_at.index]);
            x_at = next;
        }
        if (!NEXT) continue;
        hc::arrive_warp(&smem.empty[x_at.index]);
        x_at.advance(X_STAGES);
    }
}

// ---- The sums of a block, which the warps that multiply add up ----

__device__ __forceinline__ void wait_for_multipliers() { hc::ptx::bar_sync(1, LANES * WARPS); }

constexpr int LANE_SUMS = ROW_FRAGS * COL_FRAGS * PAIRS * 4;
constexpr int PITCH = LANES + 1;  // between a lane's sums: those of eight channels lie in different banks
constexpr int WARP_SUMS = LANE_SUMS * PITCH + (LANE_SUMS % 32 ? 0 : 16);

__device__ __forceinline__ void write_sums(float* to, const Sums& sums) {
    to += threadIdx.x / LANES * WARP_SUMS + threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < LANE_SUMS; ++i)
        to[i * PITCH] = sums[i / (4 * PAIRS * COL_FRAGS)][i / (4 * PAIRS) % COL_FRAGS][i / 4 % PAIRS][i % 4];
}

// A tap's sum over the pixels of a patch and the warps that share units.
__device__ __forceinline__ float tap_sum(const float* sums, int channel, int r, int s) {
    float sum = 0;
    for (int unit = 0; unit < UNIT_WARPS; ++unit)
#pragma unroll
        for (int a = 0; a < PATCH; ++a) {
            const int row = r + a / PATCH_COLS, col = s + a % PATCH_COLS;  // of the window
            const int b = row % FRAG_ROWS * FRAG_COLS + col % FRAG_COLS, frag = col / FRAG_COLS;
            const int warp = unit * EIGHTS + channel / 8;
            const int word = (row / FRAG_ROWS * COL_FRAGS + frag) * PAIRS + channel % 8 / 2;
            const int e = channel % 2 * 2 + b % 2, lane = a * 4 + b / 2;
            sum += sums[warp * WARP_SUMS + (word * 4 + e) * PITCH + lane];
        }
    return sum;
}

// A tap's sum once more, by the whole warp, of products that belong into it only.
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
                sum +=
                    hc::to_acc(dy[row * p.dy_h + col * p.dy_w]) * (inside ? hc::to_acc(x[h * p.x_h + w * p.x_w]) : 0.f);
            }
    }
    return hc::warp_sum(sum);
}

__device__ __forceinline__ void write_partials(const Params& p, const float* sums) {
    constexpr int COUNT = R * S * CHANNELS;
    const Walk walk(p.cut);
    const int lane = threadIdx.x % LANES, channels = min(CHANNELS, p.channels - walk.channel_block * CHANNELS);
    float* const partials = p.partials + (walk.part * (i64)p.cut.channel_blocks + walk.channel_block) * COUNT;
    for (int first = threadIdx.x - lane; first < COUNT; first += LANES * WARPS) {
        const int i = first + lane, channel = i % CHANNELS, tap = i / CHANNELS;
        float sum = i < COUNT ? tap_sum(sums, channel, tap / S, tap % S) : 0.f;
        unsigned left = __ballot_sync(0xffffffffu, channel < channels && sum * 0.f != 0.f);
        for (; left; left &= left - 1) {
            const int other = __ffs(left) - 1, at = first + other;
            const float again = sum_again(p, at % CHANNELS, at / CHANNELS / S, at / CHANNELS % S);
            if (lane == other) sum = again;
        }
        if (i < COUNT) partials[i] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_pairs_wgrad(const Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    const Smem smem(dynamic_smem);
    float* const all_sums = reinterpret_cast<float*>(smem.x);
    begin(smem);
    if (threadIdx.x / LANES >= WARPS) {
        copy(p, smem);
        return;
    }
    Sums sums = {};
    sum_runs(sums, p, smem);
    wait_for_multipliers();  // the rings have been read
    write_sums(all_sums, sums);
    wait_for_multipliers();
    write_partials(p, all_sums);
}
