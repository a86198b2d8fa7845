// halo_sm90_sum: outputs from the partial sums of split-K.
//
// Where a layer has too few work tiles for all multiprocessors, halo_sm90 takes ranges of its channels, as if each were
// a group of its own, and leaves fp32 sums in the order of the output, split after split: of an image (pixels are
// neighbours) or of a pixel (filters are). They are always added in that order. One thread an output, a grid's stride
// apart; neighbouring threads read neighbours.
#include "families/halo_sm90/relu.cuh"
#include "kernels/numeric.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; HAS_BIAS adds bias[filter]; HAS_RELU: max(0, y) instead of y.
using hc::i64;
using elem_t = ELEM;

struct Params {
    const float* partial;
    elem_t* y;
    const elem_t* bias;
    i64 outputs, inner;          // of all images; of an image or of a pixel, in which splits follow each other
    int splits, plane, filters;  // neighbours of one filter; filters
};

extern "C" __global__ void halo_sm90_sum(const __grid_constant__ Params p) {
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < p.outputs; i += i64(gridDim.x) * blockDim.x) {
        const i64 outer = i / p.inner, in = i - outer * p.inner;
        const float* from = p.partial + outer * p.splits * p.inner + in;
        float sum = 0;
        for (int split = 0; split < p.splits; ++split) sum += from[split * p.inner];
        if (HAS_BIAS) sum += hc::to_acc(p.bias[in / p.plane]);
        p.y[i] = hc::from_acc<elem_t>(HAS_RELU ? hc::relu(sum) : sum);
    }
}
