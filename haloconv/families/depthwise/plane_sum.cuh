// The sum of one tap of a filter gradient over planes, element by element, by a warp: of products that belong into it
// only. A zero of the padding times an infinity is a NaN that does not.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/warp_sum.cuh"

namespace hc {

// A plane whose columns are neighbours; its rows are `step` elements apart.
template <class Elem>
struct Plane {
    const Elem* at;
    i64 step;
    int rows, cols;
};

// A lane's part of a sum, over rows [begin, end) of dy, of dy times the pixel of x that lies (down, right) of it.
template <class Elem>
__device__ __forceinline__ float plane_sum(const Plane<Elem>& x, const Plane<Elem>& dy, int begin, int end, int down,
                                           int right) {
    float sum = 0;
    for (int row = begin; row < end && row < dy.rows; ++row)
        for (int col = threadIdx.x % 32; col < dy.cols; col += 32) {
            const int h = row + down, w = col + right;
            const bool inside = (unsigned)h < (unsigned)x.rows && (unsigned)w < (unsigned)x.cols;
            const float value = inside ? to_acc(x.at[h * x.step + w]) : 0.f;
            sum += to_acc(dy.at[row * dy.step + col]) * value;
        }
    return sum;
}

}  // namespace hc
