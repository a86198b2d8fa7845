// One image axis of a depthwise problem, cut until what is left has no dilation.
//
// In every direction, result a gathers at tap j from position base + a * pixel_move + j * tap_move of its source. Both
// moves divided by their greatest common divisor, results of one class (the same residue modulo the tap move) meet
// positions origin + spacing * (stride * a + j): a correlation with a stride, without dilation.
#pragma once

#include "kernels/geometry.cuh"

namespace hc {

// What the launch says about an axis. `results` and `extent` are those of the result and of the source, in pixels.
struct AxisParams {
    int taps, stride, dil, pad, results, extent;
    int classes;       // of results
    int tile, tiles;   // results of a block, in its class; tiles of the largest class
    int chunk;         // taps that are staged at a time
    int lines, steps;  // of the window: rows or columns of one residue class of the stride; the stride there
};

struct Line {
    int origin, spacing, stride;
    int taps, tap_first, tap_step;  // tap j is filter index tap_first + j * tap_step
    int first, step, results;       // result a stands at first + a * step

    __device__ __forceinline__ int position(int a_and_tap) const { return origin + spacing * a_and_tap; }
};

__device__ __forceinline__ int results_of(int pixels, int index, int classes) {
    return pixels > index ? (pixels - index + classes - 1) / classes : 0;
}

// Class `index` of output pixels.
__device__ __forceinline__ Line output_line(const AxisParams& p, int index) {
    return {index * p.stride - p.pad,
            p.dil,
            p.steps,
            p.taps,
            0,
            1,
            index,
            p.classes,
            results_of(p.results, index, p.classes)};
}

// Class `index` of input pixels in dgrad: of the residue modulo the stride, and in it modulo the dilation. Tap j is the
// last one but j, so that positions grow with taps.
__device__ __forceinline__ Line input_line(const AxisParams& p, int index) {
    const int residues = p.stride < p.results ? p.stride : p.results;
    const int inner = index / residues;
    const Axis axis = input_axis(p.taps, p.stride, p.dil, p.pad, p.results, index % residues);
    const int spacing = -axis.tap_move;
    return {axis.base + inner - spacing * (axis.taps - 1),
            spacing,
            1,
            axis.taps,
            axis.first + (axis.taps - 1) * axis.step,
            -axis.step,
            axis.residue + inner * axis.spacing,
            axis.spacing * spacing,
            results_of(axis.pixels, inner, spacing)};
}

}  // namespace hc
