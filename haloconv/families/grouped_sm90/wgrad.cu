// grouped_sm90_wgrad: the weight gradient of grouped layers in 16-bit channels_last on tensor cores, stride 1, from
// Hopper on, as partial sums.
//
//   dw[k, c, r, s] = sum over pixels (n, p, q) of dy[n, k, p, q] * x[n, c, p + r - pad_top, q + s - pad_left]
//
// TMA brings rows of x and of dy, 128 bytes of channels wide, whole groups. A warp has 16 * K_STEPS columns of one
// group and marches down: ldmatrix transposes a row of x, once for each horizontal tap, and the fragments of the last R
// rows of dy stay in registers. So both are read from shared memory without regard to the vertical taps. All products
// of a warp go into the same few sums.
//
// Budget: 4 * R * PAIRS * N_TILES registers for sums, 2 * R * K_STEPS * N_TILES for dy; a ring of stages of ROWS rows
// of x and dy in shared memory.
#include "families/grouped_sm90/slab.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others integers.
//   R S                  filter taps
//   ATOMS                16 bytes of channels in a group
//   ROWS                 rows of a stage
//   K_STEPS N_TILES      16 columns, 8 filters each, of a warp
//   MIN_BLOCKS           blocks per multiprocessor that registers must allow
namespace hc::grouped {

constexpr int WARPS_N = ATOMS / N_TILES;
constexpr int CONSUMERS = SLAB_GROUPS * WARPS_N;  // warps
constexpr int THREADS = 32 * (CONSUMERS + 1);
constexpr int STRIP_COLS = 16 * K_STEPS;
constexpr int ROW_ATOMS = S * ATOMS;           // that a fragment of a row has
constexpr int PAIRS = ceil_div(ROW_ATOMS, 2);  // of them, the 16 rows of a product each
constexpr int GROUP_CHANNELS = ATOMS * ATOM_ELEMS;
constexpr int Y_ROW_BYTES = STRIP_COLS * SLAB_BYTES, Y_BYTES = ROWS * Y_ROW_BYTES;

static_assert(sizeof(elem_t) == 2, "ldmatrix transposes 16-bit elements");
static_assert(ATOMS % N_TILES == 0, "warps share the filters of a group evenly");

struct Params {
    TensorMap x_map, y_map;
    const elem_t *x, *dy;
    float* partials;  // [block][consumer][sum of a lane][lane]
    Cut cut;
    int rows, cols;  // extents of dy
};

struct Smem {
    char* stages;
    ptx::u64 *full, *empty;
    int x_row_bytes, x_bytes, stage_bytes;

    __device__ __forceinline__ Smem(const Cut& cut, char* smem)
        : x_row_bytes(cut.x_cols * SLAB_BYTES), x_bytes(ROWS * x_row_bytes), stage_bytes(x_bytes + Y_BYTES) {
        stages = smem;
        full = reinterpret_cast<ptx::u64*>(stages + cut.stages * stage_bytes), empty = full + cut.stages;
    }
};

__device__ __forceinline__ void begin(const Params& p, const Smem& smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.cut.stages; ++i) {
            ptx::mbarrier_init(&smem.full[i], 1);
            ptx::mbarrier_init(&smem.empty[i], CONSUMERS);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
}

// The thread that asks for rows.
__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    Walk walk(p.cut);
    Cursor at;
    Run run;
    while (walk.next(p.cut, run))
        for (int band = 0; band < run.bands + WARMUP; ++band, at.advance(p.cut.stages)) {
            char* const stage = smem.stages + at.index * smem.stage_bytes;
            const int row = (run.first + band) * ROWS, channel = walk.slab * SLAB_ELEMS;
            wait(&smem.empty[at.index], at.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(&smem.full[at.index], smem.x_bytes + (band < run.bands ? Y_BYTES : 0));
            ptx::cp_async_bulk_tensor_4d_shared_global(stage, &p.x_map, &smem.full[at.index], channel,
                                                       run.strip * STRIP_COLS - p.cut.left, row - p.cut.top, run.image);
            if (band < run.bands)
                ptx::cp_async_bulk_tensor_4d_shared_global(stage + smem.x_bytes, &p.y_map, &smem.full[at.index],
                                                           channel, run.strip * STRIP_COLS, row, run.image);
        }
}

// A warp's place in a slab: its group, its first eight of the group's filters.
struct Place {
    int group, eight;

    __device__ __forceinline__ Place() {
        const int warp = threadIdx.x / 32;
        eight = warp % WARPS_N * N_TILES, group = warp / WARPS_N;
    }
};

// Bytes from the start of a row to what a lane asks of ldmatrix: of x matrices are two atoms of eight columns, then of
// the next eight; of dy eight columns of an eight of filters, then the next ones.
struct Lanes {
    int x[K_STEPS][PAIRS], y[K_STEPS];

    __device__ __forceinline__ Lanes(const Place& place, int x_cols) {
        const int lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                int atom = 2 * pair + matrix % 2;
                atom = atom < ROW_ATOMS ? atom : ROW_ATOMS - 1;
                const int col = k * 16 + matrix / 2 * 8 + lane % 8 + atom / ATOMS;
                x[k][pair] = place_in_row(col < x_cols ? col : x_cols - 1, place.group * ATOMS + atom % ATOMS);
            }
            y[k] = place_in_row(k * 16 + lane % 16, place.group * ATOMS + place.eight);
        }
    }
};

using Sums = float[R][PAIRS][N_TILES][4];
using XRow = unsigned[K_STEPS][PAIRS][4];
using YRows = unsigned[R][K_STEPS][N_TILES][2];  // the youngest first
using Masks = unsigned[K_STEPS][2];              // of a lane's columns: the words of x that count

__device__ __forceinline__ void mask_columns(Masks& masks, int cols) {
#pragma unroll
    for (int i = 0; i < 2 * K_STEPS; ++i) {
        const int left = cols - (i * 8 + threadIdx.x % 4 * 2);
        masks[i / 2][i % 2] = left > 1 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
    }
}

// x behind the last column may be infinite, and dy is zero there.
__device__ __forceinline__ void load_x(XRow& x, const char* row, const Lanes& lanes, const Masks& masks) {
#pragma unroll
    for (int i = 0; i < K_STEPS * PAIRS; ++i) {
        const int k = i / PAIRS, pair = i % PAIRS;
        ptx::ldmatrix_x4_trans(x[k][pair], row + lanes.x[k][pair]);
#pragma unroll
        for (int word = 0; word < 4; ++word) x[k][pair][word] &= masks[k][word / 2];
    }
}

__device__ __forceinline__ void load_y(YRows& y, const char* row, const Lanes& lanes) {
#pragma unroll
    for (int i = 0; i < K_STEPS * N_TILES; ++i)
        ptx::ldmatrix_x2_trans(y[0][i / N_TILES][i % N_TILES], row + (lanes.y[i / N_TILES] ^ i % N_TILES * ATOM_BYTES));
}

__device__ __forceinline__ void age(YRows& y) {
#pragma unroll
    for (int r = R - 1; r > 0; --r)
#pragma unroll
        for (int i = 0; i < K_STEPS * N_TILES * 2; ++i)
            y[r][i / 2 / N_TILES][i / 2 % N_TILES][i % 2] = y[r - 1][i / 2 / N_TILES][i / 2 % N_TILES][i % 2];
}

// Row `row` of a run's x with the rows of dy that it meets, of `rows`.
__device__ __forceinline__ void multiply_row(Sums& sums, const XRow& x, const YRows& y, int row, int rows) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
        if ((unsigned)(row - r) >= (unsigned)rows) continue;
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
            for (int i = 0; i < PAIRS * N_TILES; ++i)
                mma(sums[r][i / N_TILES][i % N_TILES], x[k][i / N_TILES], y[r][k][i % N_TILES], elem_t{});
    }
}

__device__ __forceinline__ void sum_runs(Sums& sums, const Params& p, const Smem& smem, const Place& place) {
    const Lanes lanes(place, p.cut.x_cols);
    YRows y = {};
    Walk walk(p.cut);
    Cursor at;
    Run run;
    while (walk.next(p.cut, run)) {
        Masks masks;
        mask_columns(masks, p.cols - run.strip * STRIP_COLS);
        const int left = p.rows - run.first * ROWS, rows = run.bands * ROWS < left ? run.bands * ROWS : left;
        for (int band = 0; band < run.bands + WARMUP; ++band, at.advance(p.cut.stages)) {
            wait(&smem.full[at.index], at.parity);
            const char* const stage = smem.stages + at.index * smem.stage_bytes;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                XRow x;
                age(y);
                load_x(x, stage + row * smem.x_row_bytes, lanes, masks);
                if (band < run.bands) load_y(y, stage + smem.x_bytes + row * Y_ROW_BYTES, lanes);
                multiply_row(sums, x, y, band * ROWS + row, rows);
            }
            ptx::fence_proxy_async_shared();  // before TMA writes here again
            arrive_warp(&smem.empty[at.index]);
        }
    }
}

// Writes a warp's sums as they lie in registers: wgrad.py knows where they belong.
__device__ __forceinline__ void write_sums(const Sums& sums, const Params& p, const Place& place) {
    constexpr int WARP_SUMS = sizeof(Sums) / sizeof(float) * 32;
    const i64 warp = (i64)blockIdx.x * CONSUMERS + threadIdx.x / 32;
    float* const to = p.partials + warp * WARP_SUMS + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < WARP_SUMS / 32; ++i) to[i * 32] = reinterpret_cast<const float*>(&sums)[i];
}

}  // namespace hc::grouped

extern "C" __global__ void __launch_bounds__(hc::grouped::THREADS, MIN_BLOCKS)
    grouped_sm90_wgrad(const __grid_constant__ hc::grouped::Params p) {
    using namespace hc::grouped;
    extern __shared__ __align__(1024) char dynamic_smem[];
    const Smem smem(p.cut, dynamic_smem);
    begin(p, smem);
    if (threadIdx.x / 32 < CONSUMERS) {
        const Place place;
        Sums sums = {};
        sum_runs(sums, p, smem, place);
        write_sums(sums, p, place);
    } else if (hc::ptx::elect_sync()) {
        produce(p, smem);
    }
}
