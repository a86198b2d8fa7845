// depthwise_lanes: fprop and dgrad of depthwise layers in fp32 and channels_last, stride 1, from Hopper on.
//
//   y[p, q] = sum over (r, s) of w[r, s] * x[p + r - pad_top, q + s - pad_left]
//
// The trick: lanes are channels, so that each access of a warp is 128 neighbouring bytes and no bank has two. The copy
// engine brings rows into a ring, asked by a warp of its own. A thread has its filter and ROWS by COLS outputs at a
// time in registers: a row of their window is COLS + S - 1 reads for up to ROWS * S * COLS multiplies. dgrad is fprop
// with the filter flipped.
//
// Budget: R * S registers for the filter, ROWS * COLS for sums, COLS + S - 1 for the window; a ring of rows.
#include "families/depthwise/finish.cuh"
#include "families/depthwise/lanes.cuh"

// Constants, all integers.
//   DGRAD                0: in is x, out is y; 1: in is dy, out is dx, and taps count from the filter's end
//   R S                  filter taps
//   ROWS COLS            pixels of a thread
//   WARPS_C WARPS_R      warps beside each other in channels, in rows
//   CHANNELS             of the tensors
//   THREADS              of a block
//   HAS_BIAS             adds bias[k]
//   AFFINE ACTIVATION    of an epilogue of fprop, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh)
using hc::i64;
using namespace hc::lanes;

static_assert(THREADS % 32 == 0 && THREADS >= 64, "one warp asks for rows, the others multiply");
static_assert(CHANNELS % 4 == 0, "TMA copies multiples of 16 bytes");

struct Params {
    hc::TensorMap in_map;
    const float *in, *w, *bias;
    float* out;
#ifdef AFFINE_AND_RESIDUAL
    const float* residual;  // as out
#endif
    i64 w_k, w_r, w_s;  // strides in elements
    Cut cut;
};

constexpr int TAPS = R * S;

// The filters of a slab as they lie in shared memory, channel by channel: an odd number of taps keeps lanes in banks of
// their own. They take the place of the last rows until all warps have read them.
constexpr int FILTER_PITCH = TAPS | 1, FILTER_BYTES = SLAB * FILTER_PITCH * (int)sizeof(float);

__device__ __forceinline__ void copy_filters(const Params& p, int slab, float* to) {
    const int left = CHANNELS - slab * SLAB, channels = left < SLAB ? left : SLAB;
    for (int i = threadIdx.x; i < channels * TAPS; i += readers() * 32) {
        const int channel = i / TAPS, tap = i % TAPS, r = tap / S, s = tap % S;
        to[channel * FILTER_PITCH + tap] = p.w[(slab * SLAB + channel) * p.w_k + r * p.w_r + s * p.w_s];
    }
}

struct Filter {
    float of[R][S];
    float bias;

    __device__ __forceinline__ Filter(const Params& p, const float* filters, const Place& place) {
        const bool there = place.channel < CHANNELS;
        const float* const own = filters + (there ? place.lane : 0) * FILTER_PITCH;
        bias = HAS_BIAS && there ? p.bias[place.channel] : 0.f;
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) of[tap / S][tap % S] = own[DGRAD ? TAPS - 1 - tap : tap];
    }
};

using Window = float[WINDOW];

struct Sums {
    float of[ROWS][COLS];

    __device__ __forceinline__ explicit Sums(float bias) {
#pragma unroll
        for (int i = 0; i < ROWS * COLS; ++i) of[i / COLS][i % COLS] = bias;
    }
    // Row `at` of the window with all rows of the filter that meet it.
    __device__ __forceinline__ void add(const Filter& filter, const Window& x, int at) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int r = at - row;
            if (r < 0 || r >= R) continue;
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int b = 0; b < COLS; ++b) of[row][b] += x[b + s] * filter.of[r][s];
        }
    }
    // What becomes of the part of `rows` by `cols`, which `store` takes to `to`.
    __device__ __forceinline__ void finish(const Params& p, int channel, const float* to, i64 stride, int rows,
                                           int cols) {
        hc::Finish own;
        if (channel < CHANNELS) own.load(p.bias, channel);
#pragma unroll
        for (int i = 0; i < ROWS * COLS; ++i) {
            const int row = i / COLS, b = i % COLS;
            const float* output = to + row * stride + b * CHANNELS;
            of[row][b] = own(of[row][b], hc::residual_at<float>(p, output, row < rows && b < cols));
        }
    }
    // The part of `rows` by `cols`.
    __device__ __forceinline__ void store(float* to, i64 stride, int rows, int cols) const {
        const bool whole = rows >= ROWS && cols >= COLS;
        if (whole) {
#pragma unroll
            for (int i = 0; i < ROWS * COLS; ++i) {
                to[i % COLS * CHANNELS] = of[i / COLS][i % COLS];
                if (i % COLS == COLS - 1) to += stride;
            }
            return;
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int b = 0; b < COLS; ++b)
                if (row < rows && b < cols) to[b * CHANNELS] = of[row][b];
            to += stride;
        }
    }
};

__device__ __forceinline__ void load(Window& x, const char* row) {
#pragma unroll
    for (int i = 0; i < WINDOW; ++i) x[i] = *reinterpret_cast<const float*>(row + i * PIXEL_BYTES);
}

__device__ __forceinline__ void convolve(const Params& p, Ring& ring, const char* stages, const Place& place,
                                         const Filter& filter) {
    const Cut& cut = p.cut;
    Walk walk = own_walk(cut);
    const char* const lane = stages + place.col * PIXEL_BYTES + place.lane * (int)sizeof(float);
    const int ring_bytes = cut.stages * cut.stage_bytes;
    const i64 row_elems = (i64)cut.cols * CHANNELS;
    Reader reader;
    Run run;
    while (walk.next(cut, run)) {
        const int col = run.strip * (cut.warps_q * COLS) + place.col, reads = run.reads();
        const int cols = place.channel < CHANNELS ? cut.cols - col : 0;
        float* out = p.out + ((i64)run.image * cut.rows + run.first + place.row) * row_elems + (i64)col * CHANNELS +
                     place.channel;
        reader.begin_run();
#pragma unroll 1
        for (int row = 0; row < run.rows; row += STEP_ROWS, out += STEP_ROWS * row_elems) {
            reader.wait_for(ring, cut, row + STEP_ROWS + R - 1);
            if (row + place.row < run.rows && col < cut.cols) {
                int window = reader.stage(cut, row + place.row) * cut.stage_bytes;
                Sums sums(filter.bias);
#pragma unroll
                for (int at = 0; at < ROWS + R - 1; ++at) {
                    Window x;
                    load(x, lane + window);
                    sums.add(filter, x, at);
                    window += cut.stage_bytes;
                    if (window == ring_bytes) window = 0;
                    if (WARPS_R == 1 && at == ROWS - 1) reader.free(ring, cut, row + STEP_ROWS);
                }
                if constexpr (EPILOGUE) sums.finish(p, place.channel, out, row_elems, run.rows - row - place.row, cols);
                sums.store(out, row_elems, run.rows - row - place.row, cols);
            }
            reader.free(ring, cut, row + STEP_ROWS < run.rows ? row + STEP_ROWS : reads);
        }
    }
}

__device__ __forceinline__ void ask_rows(const Params& p, Ring& ring, char* stages) {
    const int filter_rows = (FILTER_BYTES + p.cut.stage_bytes - 1) / p.cut.stage_bytes;
    int early = p.cut.stages - filter_rows;  // rows that may land while the filters are there
    ask(ring, p.cut, stages, [&](char* stage, hc::ptx::u64* full, int slab, const Run& run, int row) {
        if (early-- == 0) hc::wait(&ring.spare, 0);
        hc::ptx::mbarrier_arrive_expect_tx(full, p.cut.stage_bytes);
        hc::ptx::cp_async_bulk_tensor_4d_shared_global(stage, &p.in_map, full, slab * SLAB,
                                                       run.strip * (p.cut.warps_q * COLS) - p.cut.left,
                                                       run.in_row(p.cut) + row, run.image);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_lanes(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Ring ring;
    if (asks()) {
        if (hc::ptx::elect_sync()) begin(ring, p.cut);
        announce_barriers();
        if (hc::ptx::elect_sync()) ask_rows(p, ring, dynamic_smem);
        return;
    }
    const int slab = own_walk(p.cut).slab;
    float* const filters = reinterpret_cast<float*>(dynamic_smem + p.cut.stages * p.cut.stage_bytes - FILTER_BYTES);
    copy_filters(p, slab, filters);
    wait_for_barriers();
    const Place place(p.cut, slab);
    const Filter filter(p, filters, place);
    hc::ptx::fence_proxy_async_shared();  // before TMA writes there
    hc::arrive_warp(&ring.spare);
    convolve(p, ring, dynamic_smem, place, filter);
}
