// Channel pairs: depthwise layers in nhwc on mma.sync, whose 32-bit words are two neighbouring channels of one pixel.
//
// A slab is 32, 64 or 128 bytes of channels of all pixels, or other 16-byte chunks; band_walk.cuh deals out its bands.
#pragma once

#include "kernels/band_walk.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace hc::pairs {

constexpr int CHUNK_BYTES = 16, CHUNK_CHANNELS = 8, CHUNK_PAIRS = 4;

// How TMA lays a row of a slab out in shared memory: PIXEL_BYTES for a column, its chunks moved by a
// swizzle of so many bytes (then rows are multiples of 8 columns), or by none if SWIZZLE_BYTES is 0.
template <int PIXEL_BYTES, int SWIZZLE_BYTES>
__device__ __forceinline__ int place_in_row(int col, int chunk) {
    static_assert(SWIZZLE_BYTES == 0 || SWIZZLE_BYTES == PIXEL_BYTES, "a swizzle is as wide as a pixel");
    if (SWIZZLE_BYTES == 0) return col * PIXEL_BYTES + chunk * CHUNK_BYTES;
    constexpr int COLS_OF_LINE = SWIZZLE_BYTES == 0 ? 1 : 128 / SWIZZLE_BYTES;
    return col * PIXEL_BYTES + (chunk ^ (col / COLS_OF_LINE & (SWIZZLE_BYTES / CHUNK_BYTES - 1))) * CHUNK_BYTES;
}

// How the output is cut.
struct Cut {
    int slabs;
    int images, strips, bands;  // strips of an image, bands of a strip
    int per_block, longer;      // bands of a block; blocks of a slab that have one more
};

}  // namespace hc::pairs
