// depthwise_lanes_wgrad: the filter gradient of depthwise layers in fp32 and channels_last, stride 1, from Hopper on,
// as partial sums.
//
//   partials[part][r, s, k] = sum over pixels (n, p, q) of dy[n, k, p, q] * x[n, k, p + r - pad_top, q + s - pad_left]
//
// The trick is that of depthwise_lanes, with sums and filter exchanged: a thread has all sums of its channel, and ROWS
// by COLS pixels of dy at a time. A row of x is COLS + S - 1 reads for up to ROWS * S * COLS multiplies. A row of dy
// lands with the last row of x that it meets. In the end a block adds the sums of its warps, in a fixed order.
//
// Budget: R * S registers for sums, ROWS * COLS for dy, COLS + S - 1 for the window; a ring of rows.
#include "families/depthwise/lanes.cuh"

// Constants, all integers.
//   R S                  filter taps
//   ROWS COLS            pixels of a thread
//   WARPS_C WARPS_R      warps beside each other in channels, in rows
//   CHANNELS             of the tensors
//   THREADS              of a block
using hc::i64;
using namespace hc::lanes;

constexpr int TAPS = R * S;

static_assert(THREADS % 32 == 0 && THREADS >= 64, "one warp asks for rows, the others multiply");
static_assert(CHANNELS % 4 == 0, "TMA copies multiples of 16 bytes");

struct Params {
    hc::TensorMap x_map, dy_map;
    const float *x, *dy;
    float* partials;
    Cut cut;
};

using Window = float[WINDOW];
using Pixels = float[ROWS][COLS];

struct Sums {
    float of[R][S] = {};

    // Row `at` of the window with all rows of dy that meet it.
    __device__ __forceinline__ void add(const Pixels& dy, const Window& x, int at) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int r = at - row;
            if (r < 0 || r >= R) continue;
#pragma unroll
            for (int b = 0; b < COLS; ++b)
#pragma unroll
                for (int s = 0; s < S; ++s) of[r][s] += dy[row][b] * x[b + s];
        }
    }
};

__device__ __forceinline__ int x_bytes(const Cut& cut) { return (cut.warps_q * COLS + S - 1) * PIXEL_BYTES; }

__device__ __forceinline__ void ask_rows(const Params& p, Ring& ring, char* stages) {
    const int bytes = x_bytes(p.cut);
    ask(ring, p.cut, stages, [&](char* stage, hc::ptx::u64* full, int slab, const Run& run, int row) {
        const int col = run.strip * (p.cut.warps_q * COLS), dy_row = row - (R - 1);
        hc::ptx::mbarrier_arrive_expect_tx(full, dy_row < 0 ? bytes : p.cut.stage_bytes);
        hc::ptx::cp_async_bulk_tensor_4d_shared_global(stage, &p.x_map, full, slab * SLAB, col - p.cut.left,
                                                       run.in_row(p.cut) + row, run.image);
        if (dy_row >= 0)
            hc::ptx::cp_async_bulk_tensor_4d_shared_global(stage + bytes, &p.dy_map, full, slab * SLAB, col,
                                                           run.first + dy_row, run.image);
    });
}

__device__ __forceinline__ float pixel(const char* row, int col) {
    return *reinterpret_cast<const float*>(row + col * PIXEL_BYTES);
}

// A thread's view of the rows that have landed, as bytes from the first.
struct Rows {
    const char* lane;
    int stage_bytes, ring_bytes;
    int dy_offset;  // of a stage's row of dy

    __device__ __forceinline__ Rows(const Cut& cut, const Place& place, const char* stages) {
        lane = stages + place.col * PIXEL_BYTES + place.lane * (int)sizeof(float);
        stage_bytes = cut.stage_bytes, ring_bytes = cut.stages * stage_bytes, dy_offset = x_bytes(cut);
    }
    __device__ __forceinline__ int below(int row) const {
        return row + stage_bytes < ring_bytes ? row + stage_bytes : 0;
    }
    __device__ __forceinline__ float x(int row, int col) const { return pixel(lane + row, col); }
    __device__ __forceinline__ float dy(int row, int col) const { return pixel(lane + dy_offset + row, col); }
};

// All pixels of a thread.
__device__ __forceinline__ void add_tile(Sums& sums, const Rows& rows, int x_row, int dy_row) {
    Pixels dy;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
        for (int b = 0; b < COLS; ++b) dy[row][b] = rows.dy(dy_row, b);
        dy_row = rows.below(dy_row);
    }
#pragma unroll
    for (int at = 0; at < ROWS + R - 1; ++at) {
        Window x;
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) x[i] = rows.x(x_row, i);
        sums.add(dy, x, at);
        x_row = rows.below(x_row);
    }
}

// The first `height` rows and `width` columns, pixel by pixel: x beside what counts may be infinite.
__device__ __forceinline__ void add_part(Sums& sums, const Rows& rows, int x_row, int dy_row, int height, int width) {
    for (int row = 0; row < height; ++row) {
        for (int b = 0; b < width; ++b) {
            const float dy = rows.dy(dy_row, b);
            int x = x_row;
#pragma unroll
            for (int r = 0; r < R; ++r) {
#pragma unroll
                for (int s = 0; s < S; ++s) sums.of[r][s] += dy * rows.x(x, b + s);
                x = rows.below(x);
            }
        }
        x_row = rows.below(x_row), dy_row = rows.below(dy_row);
    }
}

__device__ __forceinline__ void sum(Sums& sums, const Params& p, Ring& ring, const char* stages) {
    const Cut& cut = p.cut;
    Walk walk = own_walk(cut);
    const Place place(cut, walk.slab);
    const Rows rows(cut, place, stages);
    Reader reader;
    Run run;
    while (walk.next(cut, run)) {
        const int width = cut.cols - run.strip * (cut.warps_q * COLS) - place.col, reads = run.reads();
        reader.begin_run();
#pragma unroll 1
        for (int row = 0; row < run.rows; row += STEP_ROWS) {
            const int own = row + place.row, height = run.rows - own;
            reader.wait_for(ring, cut, row + STEP_ROWS + R - 1);
            const int x_row = reader.stage(cut, own) * cut.stage_bytes;
            const int dy_row = reader.stage(cut, own + R - 1) * cut.stage_bytes;
            if (height >= ROWS && width >= COLS)
                add_tile(sums, rows, x_row, dy_row);
            else if (height > 0)
                add_part(sums, rows, x_row, dy_row, height < ROWS ? height : ROWS, width < COLS ? width : COLS);
            reader.free(ring, cut, row + STEP_ROWS < run.rows ? row + STEP_ROWS : reads);
        }
    }
}

// Adds the sums of all warps of a channel, in their order, and writes them.
__device__ __forceinline__ void write(const Sums& sums, const Params& p, float* all) {
    const Walk walk = own_walk(p.cut);
    const int threads = readers() * 32, group = threadIdx.x / SLAB;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
        all[(group * TAPS + tap) * SLAB + threadIdx.x % SLAB] = sums.of[tap / S][tap % S];
    hc::ptx::bar_sync(2, threads);
    float* const to = p.partials + (i64)walk.part * (TAPS * CHANNELS) + walk.slab * SLAB;
    for (int i = threadIdx.x; i < TAPS * SLAB; i += threads) {
        float total = 0;
        for (int other = 0; other < threads / SLAB; ++other) total += all[other * (TAPS * SLAB) + i];
        if (walk.slab * SLAB + i % SLAB < CHANNELS) to[i / SLAB * CHANNELS + i % SLAB] = total;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_lanes_wgrad(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Ring ring;
    if (asks()) {
        if (hc::ptx::elect_sync()) begin(ring, p.cut);
        announce_barriers();
        if (hc::ptx::elect_sync()) ask_rows(p, ring, dynamic_smem);
        return;
    }
    wait_for_barriers();
    Sums sums;
    sum(sums, p, ring, dynamic_smem);
    hc::ptx::bar_sync(2, readers() * 32);  // all have read the last rows
    write(sums, p, reinterpret_cast<float*>(dynamic_smem));
}
