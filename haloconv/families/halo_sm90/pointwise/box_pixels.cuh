// How many places of a box of pixels have one. These come first: a box of several rows has them from end to end.
#pragma once

#include "kernels/divisor.cuh"

namespace hc::pointwise {

// Pixels of a box: `cols` of a row and `rows` of an image are cut into boxes of box_cols by box_rows.
struct BoxPixels {
    Divisor across, down;  // boxes of a row; rows of boxes of an image
    int cols, rows, box_cols, box_rows;
    int one_line;  // 1: all boxes are of one row

    __device__ __forceinline__ int of(int box) const {
        if (one_line) return min(box_cols, cols - box * box_cols);
        const int line = across.quotient(box), image = down.quotient(line);
        const int column = (box - line * across.value) * box_cols, row = (line - image * down.value) * box_rows;
        return min(box_cols, cols - column) * min(box_rows, rows - row);
    }
};

}  // namespace hc::pointwise
