// The sums of halo_sm90_pointwise on their way out: slab by slab through a buffer in shared memory, from where TMA
// takes boxes.
//
// A slab is 64 rows of M by SLAB columns of N. Its buffer is swizzled: rows of M of 128 bytes; or, where pixels are M
// and neighbours in the result, rows of 32 pixels of each of its filters, box after box.
#pragma once

#include "families/halo_sm90/pointwise/tile.cuh"
#include "families/halo_sm90/swizzle.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/ldmatrix.cuh"

namespace hc::pointwise {

using Sums = float[M_BLOCKS][COLUMNS / 2];

constexpr bool TRANSPOSES = PIXELS_M && !Y_INNER;
static_assert(!TRANSPOSES || SIZE == 4, "16-bit pixels are N where they are neighbours in the result");
constexpr int GROUPS = SLAB / 8;  // columns of a slab, eight each

// X_IN_REGISTERS: which pixel of its consumer's block of 64 is a lane's row of M, the one of the first or of the second
// eight: a box of 32, one of its eight units of 4 pixels, a pixel of that. Rows 0 to 3 and 4 to 7 are four units apart:
// so in swizzled rows, of channels or of filters, four rows that follow one another have eight different units.
struct RowPlace {
    int box, unit, word;

    __device__ __forceinline__ explicit RowPlace(int half) {
        const int warp = threadIdx.x % 128 / 32, row = threadIdx.x % 32 / 4;
        box = warp / 2, unit = warp % 2 * 2 + half + row / 4 * 4, word = row % 4;
    }
    __device__ __forceinline__ int pixel() const { return box * 32 + unit * 4 + word; }
};

// A lane's row of its consumer's block of M, as a row of a buffer.
__device__ __forceinline__ int row_of(int half) {
    if (X_IN_REGISTERS) return RowPlace(half).pixel();
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// A consumer: its first row and column of the tile, and its buffers.
struct Consumer {
    int m, n;
    char* buffers;
    int next = 0;  // buffer
    int barrier;
    bool sends;  // the thread that asks TMA

    __device__ __forceinline__ Consumer(const Smem& smem, int id)
        : m(SPLIT_N ? 0 : id * 64 * M_BLOCKS),
          n(SPLIT_N ? id * COLUMNS : 0),
          buffers(smem.buffers + id * Y_BUFFERS * SLAB_BYTES),
          barrier(1 + id),
          sends(threadIdx.x % 128 / 32 == 0 && ptx::elect_sync()) {}

    // Waits until TMA has read the buffers.
    __device__ __forceinline__ void settle() const {
        if (sends) ptx::cp_async_bulk_wait_group_read<0>();
    }
};

__device__ __forceinline__ BiasAndScale own_of(const Params& p, int filter) {
    if (AFFINE == Affine::NONE || filter >= p.filters) return {};
    return bias_and_scale(p.bias[filter]);
}

// Where in the result place `px` of a box is, in elements behind the pixel's first filter; -1: outside.
template <class P>
__device__ __forceinline__ i64 place_of(const P& p, int box, int px) {
    const Place at(p, box);
    const int down = p.box_line.quotient(px), row = at.row + down, column = at.column + px - down * p.box_cols;
    const bool inside = down < p.box_rows && row < p.y_rows && column < p.y_cols && at.image < p.y_images;
    return inside ? at.image * p.y_image + row * p.y_row + column * p.y_col : -1;
}

// Adds the residual to the sums of a slab behind bias and scale: an element for each output, wherever that goes. Its
// address may be any, so elements come one by one, all of them on their way at once. The slab begins in row `m` and
// column `n` of its tile.
template <class P, int COUNT>
__device__ __forceinline__ void add_residual(const P& p, const Tile& tile, float (&sums)[COUNT], int first, int m,
                                             int n) {
    float values[4 * GROUPS];
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) {
        const int row = m + row_of(i / 2 % 2), column = n + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const int px = PIXELS_M ? row : column, filter = tile.filter + (PIXELS_M ? column : row);
        const i64 place = place_of(p, tile.box + px / BOX_PX, px % BOX_PX);
        values[i] = place >= 0 && filter < p.filters ? to_acc(p.residual[place + filter * p.y_filter]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) {
        const int own = tile.filter + (PIXELS_M ? n + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 : m + row_of(i / 2 % 2));
        float& sum = sums[4 * first + i];
        sum = finished<AFFINE, Activation::NONE>(sum, own_of(p, own)) + values[i];
    }
}

// Makes outputs of the sums of a slab, in place. `filter` is the one with which the slab begins.
template <int COUNT>
__device__ __forceinline__ void finish(const Params& p, float (&sums)[COUNT], int first, int filter) {
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) {
        float& sum = sums[4 * first + i];
        const int half = i / 2 % 2;
        const int own = filter + (PIXELS_M ? i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 : row_of(half));
        sum = finished<RESIDUAL ? Affine::NONE : AFFINE, ACTIVATION>(sum, own_of(p, own));
    }
}

struct alignas(8) FloatPair {
    float of[2];
};

// Fills a buffer with a slab of a block's sums, whose first eight columns are `first`.
template <int COUNT>
__device__ __forceinline__ void fill(char* buffer, const float (&sums)[COUNT], int first) {
    const int lane = threadIdx.x % 32, column = lane % 4;
    if constexpr (TRANSPOSES) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const RowPlace at(i / 2);
            char* const to = buffer + at.box * (SLAB * ROW_BYTES) +
                             unit_offset<ROW_BYTES>(2 * column + i % 2, at.unit) + at.word * 4;
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
                *reinterpret_cast<float*>(to + j * (8 * ROW_BYTES)) = sums[4 * (first + j) + i];
        }
    } else if constexpr (sizeof(y_elem_t) == 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int to = unit_offset<ROW_BYTES>(row_of(half), column / 2) + column % 2 * 8;
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                const int from = 4 * (first + j) + 2 * half;
                *reinterpret_cast<FloatPair*>(buffer + (to ^ j << 5)) = {sums[from], sums[from + 1]};
            }
        }
    } else {
        const int row = threadIdx.x % 128 / 32 * 16 + lane % 16, to = unit_offset<ROW_BYTES>(row, lane / 16);
#pragma unroll
        for (int j = 0; j < GROUPS; j += 2) {
            unsigned matrices[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int from = 4 * (first + j + i / 2) + 2 * (i % 2);
                matrices[i] = from_acc_pair<y_elem_t>(sums[from], sums[from + 1]);
            }
            ptx::stmatrix_x4(buffer + (to ^ j << 4), matrices);
        }
    }
}

// Sends a slab that begins in row `m` and column `n` of its tile.
__device__ __forceinline__ void send(const Params& p, const Tile& tile, const char* buffer, int m, int n) {
    if constexpr (PIXELS_M) {
#pragma unroll
        for (int i = 0; i < 64 / BOX_PX; ++i) {
            const Place at(p, tile.box + m / BOX_PX + i);
            const int filter = tile.filter + n;
            ptx::cp_async_bulk_tensor_5d_global_shared(&p.y_map, buffer + i * (SLAB_BYTES / (64 / BOX_PX)),
                                                       Y_INNER ? filter : at.column, Y_INNER ? at.column : filter,
                                                       at.row, at.image, tile.split);
        }
    } else {
        const Place at(p, tile.box + n / BOX_PX);
        ptx::cp_async_bulk_tensor_5d_global_shared(&p.y_map, buffer, at.column + n % BOX_PX, tile.filter + m, at.row,
                                                   at.image, tile.split);
    }
    ptx::cp_async_bulk_commit_group();
}

// Writes the sums of a tile. When a slab goes, TMA has read the slab whose buffer is the next one's.
__device__ __forceinline__ void write(const Params& p, Consumer& self, const Tile& tile, Sums& sums) {
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const int m = self.m + 64 * block, n = self.n + slab * SLAB;
            char* const buffer = self.buffers + self.next * SLAB_BYTES;
            self.next = self.next + 1 == Y_BUFFERS ? 0 : self.next + 1;
            if constexpr (RESIDUAL) add_residual(p, tile, sums[block], slab * GROUPS, m, n);
            finish(p, sums[block], slab * GROUPS, tile.filter + (PIXELS_M ? n : m));
            fill(buffer, sums[block], slab * GROUPS);
            ptx::fence_proxy_async_shared();
            if (self.sends) ptx::cp_async_bulk_wait_group_read<Y_BUFFERS - 2>();
            ptx::bar_sync(self.barrier, 128);
            if (self.sends) send(p, tile, buffer, m, n);
        }
}

}  // namespace hc::pointwise
