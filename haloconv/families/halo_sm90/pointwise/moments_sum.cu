// halo_sm90_moments_sum: mean and variance of each filter's results, from those of their boxes of 64 pixels.
//
//   mean = 64 * sum of means / pixels   variance = (sum of squares + 64 * sum of means^2) / pixels - mean^2
//
// over all boxes, whose places beyond the last pixel have zeros (halo_sm90/pointwise/moments.cuh), so that sums are
// those of the pixels. Sums are in fp64, in a fixed order: what cancels has 29 bits more than the result.
//
// A block has FILTERS filters, which neighbouring lanes read; its other threads share the boxes. Budget: AT_ONCE
// registers for loads, sums of all threads in shared memory.
#include "kernels/numeric.cuh"
#include "kernels/ptx/fence.cuh"

// Constants: none.
using hc::i64;

constexpr int THREADS = 512, FILTERS = 8, BOX_LANES = THREADS / FILTERS, AT_ONCE = 8;
constexpr int BOX_PX = 64;  // places of a box
static_assert((BOX_LANES & (BOX_LANES - 1)) == 0, "the tree halves the lanes that share boxes");

struct alignas(8) Moments {
    float mean, squares;
};

struct Params {
    const Moments* moments;  // [box][filter]
    float *mean, *variance;  // of each filter
    i64 pixels;
    int boxes, filters;
};

struct Smem {
    double means[BOX_LANES][FILTERS], squares[BOX_LANES][FILTERS];
};

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm90_moments_sum(const __grid_constant__ Params p) {
    __shared__ Smem smem;
    const int lane = threadIdx.x % FILTERS, box_lane = threadIdx.x / FILTERS;
    const int filter = blockIdx.x * FILTERS + lane;
    hc::ptx::griddepcontrol_wait();
    double means = 0, squares = 0;
    for (int box = box_lane; filter < p.filters && box < p.boxes; box += AT_ONCE * BOX_LANES) {
        Moments found[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = box + i * BOX_LANES;
            found[i] = at < p.boxes ? p.moments[i64(at) * p.filters + filter] : Moments{};
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const double mean = found[i].mean;
            means += mean, squares += found[i].squares + BOX_PX * mean * mean;
        }
    }
    smem.means[box_lane][lane] = means, smem.squares[box_lane][lane] = squares;
    __syncthreads();
    for (int half = BOX_LANES / 2; half > 0; half /= 2) {
        if (box_lane < half) {
            smem.means[box_lane][lane] += smem.means[box_lane + half][lane];
            smem.squares[box_lane][lane] += smem.squares[box_lane + half][lane];
        }
        __syncthreads();
    }
    if (box_lane > 0 || filter >= p.filters) return;
    const double pixels = double(p.pixels), mean = BOX_PX * smem.means[0][lane] / pixels;
    const double variance = smem.squares[0][lane] / pixels - mean * mean;
    p.mean[filter] = float(mean);
    p.variance[filter] = variance < 0 ? 0 : float(variance);
}
