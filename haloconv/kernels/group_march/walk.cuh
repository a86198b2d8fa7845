// What the kernels that march through grouped channels_last layers share: slabs of channels, the walk of a block.
//
// A slab is 128 bytes of channels, whole groups of them. Of a slab the output is cut into images, strips of columns and
// bands of ROWS rows; of all bands, in this order, each of the slab's blocks takes an equal share, and marches down its
// strips. Blocks of neighbouring slabs run at a time: what they read and write lies beside each other.
#pragma once

#include "pipeline.cuh"
#include "products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/tensor_map.cuh"

namespace hc::march {

using elem_t = ELEM;

constexpr int ATOM_BYTES = 16, ATOM_ELEMS = ATOM_BYTES / (int)sizeof(elem_t);  // a row of a matrix of ldmatrix
constexpr int SLAB_BYTES = 128, SLAB_ELEMS = SLAB_BYTES / (int)sizeof(elem_t);
constexpr int SLAB_GROUPS = SLAB_BYTES / (ATOMS * ATOM_BYTES);
constexpr int WARMUP = (R - 1 + ROWS - 1) / ROWS;  // bands of x that a run begins with before its first outputs

static_assert(8 % ATOMS == 0, "a slab is whole groups");

// How the output is cut.
struct Cut {
    int slabs, images, strips, bands;  // bands: of a strip
    int share, longer;                 // bands of a block; blocks of a slab that have one more
    int groups;
    int top, left;       // from the first output up to the first row of the first stage, and left to the first column
    int x_cols, stages;  // of a stage of x, a multiple of 8; buffers of x
};

// Neighbouring bands of one strip.
struct Run {
    int image, strip, first, bands;
};

// A block's share.
struct Walk {
    int slab, part;  // the block's number among those of its slab
    int at, end;     // bands

    __device__ __forceinline__ explicit Walk(const Cut& cut) {
        part = blockIdx.x / (unsigned)cut.slabs, slab = blockIdx.x - part * cut.slabs;
        at = part * cut.share + (part < cut.longer ? part : cut.longer);
        end = at + cut.share + (part < cut.longer);
    }

    __device__ __forceinline__ bool next(const Cut& cut, Run& run) {
        if (at >= end) return false;
        const int column = at / cut.bands, left = (column + 1) * cut.bands - at, own = end - at;
        run.image = column / cut.strips, run.strip = column - run.image * cut.strips;
        run.first = at - column * cut.bands, run.bands = left < own ? left : own;
        at += run.bands;
        return true;
    }
};

// Bytes of column `col`, atom `atom` in a row of a box with a swizzle of 128 bytes. Rows are multiples of 8 columns.
__device__ __forceinline__ int place_in_row(int col, int atom) {
    return col * SLAB_BYTES + (atom ^ (col & 7)) * ATOM_BYTES;
}

}  // namespace hc::march
