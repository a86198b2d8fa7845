// Elements of dw whose sum over tiles is NaN, by a plain sum.
//
// Pixels of x meet the zeros of gaps in dy, where an infinity makes a NaN that dw does not have. So does a sum that is
// to be one. Each is computed again, by all lanes of a warp together: finite tensors have none.
#pragma once

#include "kernels/geometry.cuh"
#include "kernels/numeric.cuh"

namespace hc::wgrad_ss {

using elem_t = ELEM;

constexpr int MEND_PIXELS = 4;  // of a lane, from one look at whether the sum is NaN to the next

// x and dy as they are in memory: strides in elements.
struct Operand {
    i64 n, c, h, w;
};

struct Layer {
    Operand x, dy;
    int images, h, w, rows, cols;  // of x; of dy
    int taps_s, dil_h, dil_w, pad_top, pad_left;
};

// dw[k, c, tap], in every lane of the warp. Where x is padding its zeros count, as they do elsewhere.
__device__ __forceinline__ float mended(const Layer& p, const elem_t* x, const elem_t* dy, int k, int c, int tap) {
    const int r = tap / p.taps_s, s = tap - r * p.taps_s;
    const i64 pixels = (i64)p.images * p.rows * p.cols;
    x += c * p.x.c, dy += k * p.dy.c;
    float sum = 0;
    i64 i = threadIdx.x % 32;
    for (i64 first = 0; first < pixels && !__any_sync(~0u, sum != sum); first += MEND_PIXELS * 32) {
        for (int n = 0; n < MEND_PIXELS && i < pixels; ++n, i += 32) {
            const Pixel at = pixel_at(i, p.rows, p.cols);
            const int row = at.row + r * p.dil_h - p.pad_top, col = at.col + s * p.dil_w - p.pad_left;
            const bool inside = (unsigned)row < (unsigned)p.h && (unsigned)col < (unsigned)p.w;
            const float from_x = inside ? to_acc(x[at.n * p.x.n + row * p.x.h + col * p.x.w]) : 0.f;
            sum = fmaf(to_acc(dy[at.n * p.dy.n + at.row * p.dy.h + at.col * p.dy.w]), from_x, sum);
        }
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    return sum;
}

}  // namespace hc::wgrad_ss
