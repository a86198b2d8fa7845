// Which filter taps meet which pixels, and where: the index arithmetic of padding, stride and dilation.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

using u64 = unsigned long long;

struct Pixel {
    int n, row, col;
};

// Splits a linear pixel index. Index is unsigned, of 32 or 64 bits.
template <class Index>
__device__ __forceinline__ Pixel split_pixel(Index index, int rows, int cols) {
    const Index line = index / (Index)cols, image = line / (Index)rows;
    return {int(image), int(line - image * rows), int(index - line * cols)};
}

// split_pixel with 32-bit division where that is enough.
__device__ __forceinline__ Pixel pixel_at(i64 index, int rows, int cols) {
    return (u64)index >> 32 ? split_pixel<u64>(index, rows, cols) : split_pixel<unsigned>(index, rows, cols);
}

// The pixel `distance` (below 2^30) places after `origin`.
__device__ __forceinline__ Pixel pixel_after(Pixel origin, int distance, int rows, int cols) {
    const unsigned col = (unsigned)origin.col + distance, lines = col / (unsigned)cols;
    const unsigned row = (unsigned)origin.row + lines, images = row / (unsigned)rows;
    return {origin.n + int(images), int(row - images * rows), int(col - lines * cols)};
}

// Taps and pixels along one image axis. Tap j is filter index first + j * step; pixel i of the axis stands at place
// residue + i * spacing of its own image and gathers, at tap j, from position base + i * pixel_move + j * tap_move.
struct Axis {
    int taps, first, step, tap_move;
    int pixels, residue, spacing, base, pixel_move;
};

// Output pixels of fprop and wgrad: every tap meets every pixel.
__device__ __forceinline__ Axis output_axis(int taps, int stride, int dil, int pad, int pixels) {
    return {taps, 0, 1, dil, pixels, 0, 1, -pad, stride};
}

__device__ __forceinline__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// Input pixels residue, residue + stride, ... of dgrad. Tap r reaches them if stride divides residue + pad - r * dil;
// those taps are stride / gcd(stride, dil) apart, so the residue class is a dense problem of its own.
__device__ __forceinline__ Axis input_axis(int taps, int stride, int dil, int pad, int extent, int residue) {
    const int step = stride / gcd(stride, dil);
    int first = 0;
    while (first < step && (residue + pad - first * dil) % stride != 0) ++first;
    const int count = first < step && first < taps ? (taps - first + step - 1) / step : 0;
    const int base = count ? (residue + pad - first * dil) / stride : 0;
    const int pixels = residue < extent ? (extent - residue + stride - 1) / stride : 0;
    return {count, first, step, -(step * dil / stride), pixels, residue, stride, base, 1};
}

// The least that a tap adds to a pixel's position.
__device__ __forceinline__ int lowest(const Axis& axis) {
    return axis.tap_move < 0 && axis.taps > 0 ? (axis.taps - 1) * axis.tap_move : 0;
}

// What the axes of a convolution depend on; rows and columns are those of its result.
struct Extents {
    int taps_r, taps_s, stride_h, stride_w, dil_h, dil_w, pad_top, pad_left;
    int rows, cols;
};

struct Axes {
    Axis vertical, horizontal;
};

// The axes of residue class `index` of the result: fprop has one class, dgrad one for each residue of the stride.
template <bool DGRAD_AXES>
__device__ __forceinline__ Axes axes_of(const Extents& e, int index) {
    if (!DGRAD_AXES)
        return {output_axis(e.taps_r, e.stride_h, e.dil_h, e.pad_top, e.rows),
                output_axis(e.taps_s, e.stride_w, e.dil_w, e.pad_left, e.cols)};
    const int residues_w = e.stride_w < e.cols ? e.stride_w : e.cols;
    return {input_axis(e.taps_r, e.stride_h, e.dil_h, e.pad_top, e.rows, index / residues_w),
            input_axis(e.taps_s, e.stride_w, e.dil_w, e.pad_left, e.cols, index % residues_w)};
}

}  // namespace hc
