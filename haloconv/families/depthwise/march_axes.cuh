// Which columns of a row meet which outputs of a thread, constants of the unrolled march; which rows are in the image.
#pragma once

#include "kernels/ceil_div.cuh"

namespace hc::march {

// A thread has OUTPUTS outputs of a row, from `first` on, and reads a window of WINDOW columns of the other tensor.
//   gathering (fprop, wgrad)  output b meets, at tap s, column (first + b) * STRIDE + s * DIL - pad
//   scattering (dgrad)        output b meets, at tap s, column (first + b + pad - s * DIL) / STRIDE where that divides;
//                             OUTPUTS is a multiple of STRIDE, and PHASE is pad modulo STRIDE
template <bool SCATTER, int TAPS, int STRIDE, int DIL, int OUTPUTS, int PHASE>
struct Columns {
    static_assert(!SCATTER || STRIDE == 1 || DIL == 1, "a scattered axis has a stride or a dilation");
    static constexpr int BEFORE = (TAPS - 1) * DIL / STRIDE;  // scattering: columns before the one that tap 0 meets
    static constexpr int WINDOW =
        SCATTER ? BEFORE + (PHASE + OUTPUTS - 1) / STRIDE + 1 : (OUTPUTS - 1) * STRIDE + (TAPS - 1) * DIL + 1;

    static __device__ __forceinline__ int first(int col, int pad) {
        return SCATTER ? (col + pad - PHASE) / STRIDE - BEFORE : col * STRIDE - pad;
    }
    static __device__ __forceinline__ constexpr bool meets(int b, int s) {
        return !SCATTER || (PHASE + b - s * DIL + TAPS * DIL * STRIDE) % STRIDE == 0;
    }
    // The place in the window, for those that meet.
    static __device__ __forceinline__ constexpr int place(int b, int s) {
        return SCATTER ? (PHASE + b - s * DIL + BEFORE * STRIDE) / STRIDE : b * STRIDE + s * DIL;
    }
};

// A range of indices: `at` is in it if (unsigned)(at - begin) < count.
struct Range {
    int begin;
    unsigned count;
    __device__ __forceinline__ bool has(int at) const { return (unsigned)(at - begin) < count; }
};

// Indices i from 0 to below `end` whose rows `row` + i * `dil` are in an image of `extent` rows.
__device__ __forceinline__ Range in_image(int row, int dil, int extent, int end) {
    const int begin = row < 0 ? ceil_div(-row, dil) : 0;
    const int stop = row < extent ? ceil_div(extent - row, dil) : 0;
    const int count = (stop < end ? stop : end) - begin;
    return {begin, count > 0 ? (unsigned)count : 0u};
}

}  // namespace hc::march
