// Both kernels that march through grouped channels_last layers: slabs of channels and how they are cut.
//
// A slab is 128 bytes of channels, whole groups of them; band_walk.cuh deals out its bands of ROWS rows.
#pragma once

#include "kernels/band_walk.cuh"
#include "kernels/ceil_div.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace hc::grouped {

using elem_t = ELEM;

constexpr int ATOM_BYTES = 16, ATOM_ELEMS = ATOM_BYTES / (int)sizeof(elem_t);  // a row of a matrix of ldmatrix
constexpr int SLAB_BYTES = 128, SLAB_ELEMS = SLAB_BYTES / (int)sizeof(elem_t);
constexpr int SLAB_GROUPS = SLAB_BYTES / (ATOMS * ATOM_BYTES);
constexpr int WARMUP = ceil_div(R - 1, ROWS);  // bands of x that a run begins with before its first outputs

static_assert(8 % ATOMS == 0, "a slab is whole groups");

// How the output is cut.
struct Cut {
    int slabs, images, strips, bands;  // bands: of a strip
    int per_block, longer;             // bands of a block; blocks of a slab that have one more
    int groups;
    int top, left;       // from the first output up to the first row of the first stage, and left to the first column
    int x_cols, stages;  // of a stage of x, a multiple of 8; buffers of x
};

// Bytes of column `col`, atom `atom` in a row of a box with a swizzle of 128 bytes. Rows are multiples of 8 columns.
__device__ __forceinline__ int place_in_row(int col, int atom) {
    return col * SLAB_BYTES + (atom ^ (col & 7)) * ATOM_BYTES;
}

}  // namespace hc::grouped
