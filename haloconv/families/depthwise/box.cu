// depthwise_box: fprop and dgrad of depthwise layers with many taps in fp32 and nchw on Hopper.
//
//   y[p, q] = sum over (r, s) of w[r, s] * x[p + r - pad_top, q + s - pad_left]
//
// The trick: TMA brings strips of planes as boxes, zeros around them included, so that no thread spends
// instructions on that. A thread has ROWS by 4 outputs at a time in registers: a row of its window is three or so reads
// of 16 bytes for up to ROWS * S * 4 multiplies. dgrad is fprop with the flipped filter. A block does every so
// many-th unit of one channel.
//
// Budget: R * S registers for the filter, ROWS * 4 for sums, a row of the window; BUFFERS units in shared memory.
#include "families/depthwise/boxes.cuh"
#include "families/depthwise/register_tile.cuh"

// Constants, all integers.
//   DGRAD                0: in is x, out is y; 1: in is dy, out is dx, and taps count from the filter's end
//   R S                  filter taps
//   MULTIPLIER           M: filters of a channel
//   ROWS                 rows of a thread's outputs
//   LEAD                 columns of the first 16 bytes of a window that the filter does not meet
//   BUFFERS              units under way, the one that is multiplied included
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
//   HAS_BIAS             adds bias[k]
//   AFFINE ACTIVATION    of an epilogue of fprop, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh)
using hc::i64;
using hc::ptx::u64;
using namespace hc::tile;

static_assert(THREADS % 32 == 0, "a block is a whole number of warps");
static_assert(BUFFERS >= 2, "units land while one is multiplied");

struct Params {
    hc::TensorMap in_map;
    const float *in, *w, *bias;
    float* out;
#ifdef AFFINE_AND_RESIDUAL
    const float* residual;  // as out
#endif
    i64 w_k, w_r, w_s;  // strides in elements
    i64 out_n, out_c, out_h;
    Cut cut;
    int channels, images, out_rows;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_box(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ u64 full[BUFFERS];
    const int channel = blockIdx.x % p.channels;
    const auto ask = [&](char* buffer, u64* barrier, const Unit& unit) {
        ask_input(p.in_map, p.cut, buffer, barrier, channel / MULTIPLIER, unit);
    };
    Ring ring(p.cut, dynamic_smem, full, blockIdx.x / p.channels);
    ring.begin(ask);
    Filter filter;
    filter.load(p, channel);
    const Place place(p.cut);
    const int window = place.window(p.cut);
    float* const out = p.out + place.image * p.out_n + channel * p.out_c + place.row * p.out_h + place.group * COLS;
#pragma unroll 1
    while (ring.has()) {
        const Unit unit = ring.unit();
        const char* const buffer = ring.landed();
        Sums sums(filter);
        if (place.active) sums.add_window(filter, buffer + window, p.cut.row_bytes);
        ring.advance(ask);
        if (place.active && unit.image + place.image < p.images) {
            if constexpr (EPILOGUE)
                sums.finish(p, channel, out + unit.image * p.out_n + unit.row * p.out_h, p.out_h,
                            p.out_rows - unit.row - place.row);
            sums.store(out + unit.image * p.out_n + unit.row * p.out_h, p.out_h, p.out_rows - unit.row - place.row);
        }
    }
}
