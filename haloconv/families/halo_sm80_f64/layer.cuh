// Which pixels and taps a class of outputs has, and the order in which the filter is packed.
#pragma once

#include "kernels/geometry.cuh"

namespace hc {

constexpr int PLANE = 8;                        // channels of a plane, and filters of an eight
constexpr int CHUNK = PLANES * PLANE;           // channels of a step
constexpr int EIGHT_BYTES = PLANE * PLANE * 8;  // of the weights of a plane and an eight: a pair of each lane

struct alignas(16) Pair {
    double of[2];
};

// Extents that the axes depend on: of the filter, and of the output.
struct Extents {
    int taps_r, taps_s, stride_h, stride_w, dil_h, dil_w, pad_top, pad_left, rows, cols;
};

struct Axes {
    Axis vertical, horizontal;
};

// Those of class number `index`: in fprop there is one, in dgrad one per residue of the stride.
__device__ __forceinline__ Axes axes_of(const Extents& e, int index) {
    if (!DGRAD)
        return {output_axis(e.taps_r, e.stride_h, e.dil_h, e.pad_top, e.rows),
                output_axis(e.taps_s, e.stride_w, e.dil_w, e.pad_left, e.cols)};
    const int residues_w = e.stride_w < e.cols ? e.stride_w : e.cols;
    return {input_axis(e.taps_r, e.stride_h, e.dil_h, e.pad_top, e.rows, index / residues_w),
            input_axis(e.taps_s, e.stride_w, e.dil_w, e.pad_left, e.cols, index % residues_w)};
}

}  // namespace hc
