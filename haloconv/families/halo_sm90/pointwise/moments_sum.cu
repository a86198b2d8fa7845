// halo_sm90_moments_sum: mean and variance of each filter's results, from those of their boxes of pixels.
//
//   mean = sum of n mean / pixels       variance = sum of (squares + n mean^2) / pixels - mean^2
//
// over the boxes of an image, or of all images, of n pixels each (halo_sm90/pointwise/moments.cuh). Sums are in fp64,
// in a fixed order: what cancels has 29 bits more than the result.
//
// A block has FILTERS filters of an image, or of all, which neighbouring lanes read; its other threads share the boxes.
// Budget: AT_ONCE registers for loads, sums of all threads in shared memory.
#include "families/halo_sm90/pointwise/box_pixels.cuh"
#include "kernels/numeric.cuh"
#include "kernels/ptx/fence.cuh"

// Constants: none.
using hc::i64;

constexpr int THREADS = 512, FILTERS = 8, BOX_LANES = THREADS / FILTERS, AT_ONCE = 8;
static_assert((BOX_LANES & (BOX_LANES - 1)) == 0, "the tree halves the lanes that share boxes");

struct alignas(8) Moments {
    float mean, squares;
};

struct Params {
    const Moments* moments;           // [box][filter]
    float *mean, *variance;           // [image][filter], or of all images
    i64 all_pixels;                   // of an image, or of all
    hc::pointwise::BoxPixels pixels;  // of a box
    int boxes, filters;               // boxes of an image, or of all
    int blocks;                       // of all filters
};

struct Smem {
    double means[BOX_LANES][FILTERS], squares[BOX_LANES][FILTERS];
};

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm90_moments_sum(const __grid_constant__ Params p) {
    __shared__ Smem smem;
    const int lane = threadIdx.x % FILTERS, box_lane = threadIdx.x / FILTERS;
    const int image = blockIdx.x / p.blocks, filter = (blockIdx.x - image * p.blocks) * FILTERS + lane;
    const int first = image * p.boxes, end = first + p.boxes;
    hc::ptx::griddepcontrol_wait();
    double means = 0, squares = 0;
    for (int box = first + box_lane; filter < p.filters && box < end; box += AT_ONCE * BOX_LANES) {
        Moments found[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = box + i * BOX_LANES;
            found[i] = at < end ? p.moments[i64(at) * p.filters + filter] : Moments{};
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const double mean = found[i].mean, pixels = p.pixels.of(min(box + i * BOX_LANES, end - 1));
            means += pixels * mean, squares += found[i].squares + pixels * mean * mean;
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
    const double pixels = double(p.all_pixels), mean = smem.means[0][lane] / pixels;
    const double variance = smem.squares[0][lane] / pixels - mean * mean;
    p.mean[image * p.filters + filter] = float(mean);
    p.variance[image * p.filters + filter] = variance < 0 ? 0 : float(variance);
}
