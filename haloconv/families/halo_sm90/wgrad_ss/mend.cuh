// Elements of dw whose sum over tiles is NaN, by a plain sum.
//
// Pixels of x meet the zeros of gaps in dy, where an infinity makes a NaN that dw does not have. So does a sum that is
// to be one. Each is computed again, by all threads of a block together: finite tensors have none.
#pragma once

#include "kernels/geometry.cuh"
#include "kernels/numeric.cuh"

namespace hc::wgrad_ss {

using elem_t = ELEM;

constexpr int SUM_THREADS = 256, MEND_PIXELS = 16;  // of a thread, from one look at whether a sum is NaN to the next

// x and dy as they are in memory: strides in elements.
struct Operand {
    i64 n, c, h, w;
};

struct Layer {
    Operand x, dy;
    int images, h, w, rows, cols;  // of x; of dy
    int taps_s, dil_h, dil_w, pad_top, pad_left;
};

// dw[k, c, tap], in every thread of the block. Where x is padding its zeros count, as they do elsewhere.
__device__ __forceinline__ float mended(const Layer& p, const elem_t* x, const elem_t* dy, int k, int c, int tap,
                                        float* warps_smem) {
    const int r = tap / p.taps_s, s = tap - r * p.taps_s;
    const i64 pixels = (i64)p.images * p.rows * p.cols;
    x += c * p.x.c, dy += k * p.dy.c;
    float sum = 0;
    for (i64 first = threadIdx.x; !__syncthreads_or(sum != sum) && first - threadIdx.x < pixels;
         first += MEND_PIXELS * SUM_THREADS) {
        for (i64 i = first; i < pixels && i < first + MEND_PIXELS * SUM_THREADS; i += SUM_THREADS) {
            const Pixel at = pixel_at(i, p.rows, p.cols);
            const int row = at.row + r * p.dil_h - p.pad_top, col = at.col + s * p.dil_w - p.pad_left;
            const bool inside = (unsigned)row < (unsigned)p.h && (unsigned)col < (unsigned)p.w;
            const float from_x = inside ? to_acc(x[at.n * p.x.n + row * p.x.h + col * p.x.w]) : 0.f;
            sum = fmaf(to_acc(dy[at.n * p.dy.n + at.row * p.dy.h + at.col * p.dy.w]), from_x, sum);
        }
    }
    warps_smem[threadIdx.x] = sum;
    __syncthreads();
    for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) warps_smem[threadIdx.x] += warps_smem[threadIdx.x + half];
        __syncthreads();
    }
    const float total = warps_smem[0];
    __syncthreads();
    return total;
}

}  // namespace hc::wgrad_ss
