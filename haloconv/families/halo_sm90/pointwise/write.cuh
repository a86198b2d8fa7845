// How the sums of halo_sm90_pointwise are stored: slab by slab through a buffer in shared memory, from where TMA takes
// boxes.
//
// A slab is 64 rows of M by SLAB columns of N. Its buffer is swizzled: rows of M of 128 bytes; or, where pixels are M
// and neighbours in the result, rows of 32 pixels of each of its filters, box after box.
#pragma once

#include "families/halo_sm90/pointwise/moments.cuh"
#include "families/halo_sm90/pointwise/stored.cuh"
#include "families/halo_sm90/pointwise/tile.cuh"
#include "families/halo_sm90/swizzle.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/ldmatrix.cuh"

namespace hc::pointwise {

using Sums = float[M_BLOCKS][COLUMNS / 2];

constexpr bool TRANSPOSES = PIXELS_M && !Y_INNER;
static_assert(!TRANSPOSES || SIZE == 4, "16-bit pixels are N where they are neighbours in the result");
constexpr int GROUPS = SLAB / 8;                     // columns of a slab, eight each
constexpr int AHEAD = RESIDUAL ? Y_BUFFERS / 2 : 1;  // slabs whose buffers are free when a slab goes

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

// The boxes of a slab that begins in row `m` and column `n` of its tile: where each is in the buffer and in the result.
template <class Copy>
__device__ __forceinline__ void for_boxes(const Params& p, const Tile& tile, int m, int n, Copy copy) {
    if constexpr (PIXELS_M) {
#pragma unroll
        for (int i = 0; i < 64 / BOX_PX; ++i) {
            const Place at(p, tile.box + m / BOX_PX + i);
            const int filter = tile.filter + n;
            copy(i * (SLAB_BYTES / (64 / BOX_PX)), Y_INNER ? filter : at.column, Y_INNER ? at.column : filter, at);
        }
    } else {
        const Place at(p, tile.box + n / BOX_PX);
        copy(0, at.column + n % BOX_PX, tile.filter + m, at);
    }
}

#ifdef AFFINE_AND_RESIDUAL
// How the residual comes: before a slab is made, TMA brings what is to be added into its buffer, as the slab will lie
// there. It is asked for AHEAD slabs before, also those of the next tile, whose products hide the latency.
struct Residual {
    int m, n;  // the consumer's first row and column of a tile
    char* buffers;
    ptx::u64* full;         // of the buffers
    Cursor arrives, asked;  // the slab that is added next, the one that is asked for next
    int tile, slab = 0;     // that is asked for next

    __device__ __forceinline__ Residual(const Smem& smem, int id, int m, int n, char* buffers)
        : m(m), n(n), buffers(buffers), full(smem.residual_full + id * Y_BUFFERS), tile(blockIdx.x) {}

    // For one thread, once TMA has read the slab whose buffer this is.
    __device__ __forceinline__ void ask(const Params& p) {
        if (tile >= p.tiles) return;
        char* const buffer = buffers + asked.index * SLAB_BYTES;
        ptx::u64* const barrier = &full[asked.index];
        ptx::mbarrier_arrive_expect_tx(barrier, p.residual_bytes);
        for_boxes(p, Tile(p, tile), m + slab / SLABS * 64, n + slab % SLABS * SLAB,
                  [&](int offset, int inner, int outer, const Place& at) {
                      ptx::cp_async_bulk_tensor_5d_shared_global(buffer + offset, &p.residual_map, barrier, inner,
                                                                 outer, at.row, at.image, 0);
                  });
        asked.advance(Y_BUFFERS);
        if (++slab == M_BLOCKS * SLABS) slab = 0, tile += gridDim.x;
    }

    __device__ __forceinline__ void wait_for_slab() {
        wait(&full[arrives.index], arrives.parity);
        arrives.advance(Y_BUFFERS);
    }
};
#endif

// A consumer: its first row and column of the tile, and its buffers.
struct Consumer {
    int m, n;
    char* buffers;
    int next = 0;  // buffer
    int barrier;
    bool sends;  // the thread that asks TMA
#ifdef AFFINE_AND_RESIDUAL
    Residual residual;
#endif

    __device__ __forceinline__ Consumer(const Smem& smem, int id)
        : m(SPLIT_N ? 0 : id * 64 * M_BLOCKS),
          n(SPLIT_N ? id * COLUMNS : 0),
          buffers(smem.buffers + id * Y_BUFFERS * SLAB_BYTES),
          barrier(1 + id),
          sends(threadIdx.x % 128 / 32 == 0 && ptx::elect_sync())
#ifdef AFFINE_AND_RESIDUAL
          ,
          residual(smem, id, m, n, buffers)
#endif
    {
    }
};

// Applies bias and scale, or what follows them, to the sums of a slab, in place. `filter` is the one that it begins
// with.
template <Affine STEP, Activation FUNCTION, int COUNT>
__device__ __forceinline__ void finish(const Params& p, float (&sums)[COUNT], int first, int filter) {
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) {
        float& sum = sums[4 * first + i];
        const int half = i / 2 % 2;
        const int own = filter + (PIXELS_M ? i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 : row_of(half));
        sum = finished<STEP, FUNCTION>(sum, own_of(p, own));
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
    for_boxes(p, tile, m, n, [&](int offset, int inner, int outer, const Place& at) {
        ptx::cp_async_bulk_tensor_5d_global_shared(&p.y_map, buffer + offset, inner, outer, at.row, at.image,
                                                   tile.split);
    });
    ptx::cp_async_bulk_commit_group();
}

#ifdef BY_LANES
// Stores a slab that begins in row `m` and column `n` of its tile: a warp its rows one by one, which are filters, lanes
// neighbouring pixels. Planes begin anywhere: two pixels are a word if both are of one plane, and it is aligned.
__device__ __forceinline__ void store(const Params& p, const Tile& tile, const char* buffer, int m, int n) {
    constexpr int EACH = SLAB / 32;  // pixels of a lane
    const int warp = threadIdx.x % 128 / 32, first = n + threadIdx.x % 32 * EACH, pixel = tile.box * BOX_PX + first;
    const int filter = tile.filter + m + warp * 16, byte = first % SLAB * int(sizeof(y_elem_t));
    if (pixel >= p.all_px) return;
    i64 place[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int image = p.image_px.quotient(pixel + i);
        place[i] = image * p.y_image + (pixel + i - image * p.image_px.value);
    }
    y_elem_t* to = p.y + tile.split * p.y_part + filter * p.y_plane;
#pragma unroll 4
    for (int row = 0; row < min(16, p.filters - filter); ++row, to += p.y_plane) {
        const char* const from = buffer + unit_offset<ROW_BYTES>(warp * 16 + row, byte / 16) + byte % 16;
        if constexpr (EACH == 1) {
            to[place[0]] = *reinterpret_cast<const y_elem_t*>(from);
        } else {
            struct alignas(4) Pair {
                y_elem_t of[2];
            };
            const Pair pair = *reinterpret_cast<const Pair*>(from);
            const bool both = place[1] == place[0] + 1 && pixel + 1 < p.all_px;
            if (both && reinterpret_cast<unsigned long long>(to + place[0]) % 4 == 0) {
                *reinterpret_cast<Pair*>(to + place[0]) = pair;
            } else {
                to[place[0]] = pair.of[0];
                if (pixel + 1 < p.all_px) to[place[1]] = pair.of[1];
            }
        }
    }
}
#endif

#ifdef AFFINE_AND_RESIDUAL
// The neighbours that a word is of.
template <class Half>
__device__ __forceinline__ float low_of(unsigned word) {
    return to_acc(Half{(unsigned short)word});
}
template <class Half>
__device__ __forceinline__ float high_of(unsigned word) {
    return to_acc(Half{(unsigned short)(word >> 16)});
}

// Adds what a buffer holds to the sums of a slab: each lane reads what it writes in `fill`.
template <int COUNT>
__device__ __forceinline__ void add(float (&sums)[COUNT], int first, const char* buffer) {
    const int lane = threadIdx.x % 32, column = lane % 4;
    if constexpr (TRANSPOSES) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const RowPlace at(i / 2);
            const char* const from = buffer + at.box * (SLAB * ROW_BYTES) +
                                     unit_offset<ROW_BYTES>(2 * column + i % 2, at.unit) + at.word * 4;
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
                sums[4 * (first + j) + i] += *reinterpret_cast<const float*>(from + j * (8 * ROW_BYTES));
        }
    } else if constexpr (sizeof(y_elem_t) == 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int from = unit_offset<ROW_BYTES>(row_of(half), column / 2) + column % 2 * 8;
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                const FloatPair pair = *reinterpret_cast<const FloatPair*>(buffer + (from ^ j << 5));
                const int to = 4 * (first + j) + 2 * half;
                sums[to] += pair.of[0], sums[to + 1] += pair.of[1];
            }
        }
    } else {
        const int row = threadIdx.x % 128 / 32 * 16 + lane % 16, from = unit_offset<ROW_BYTES>(row, lane / 16);
#pragma unroll
        for (int j = 0; j < GROUPS; j += 2) {
            unsigned matrices[4];
            ptx::ldmatrix_x4(matrices, buffer + (from ^ j << 4));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int to = 4 * (first + j + i / 2) + 2 * (i % 2);
                sums[to] += low_of<y_elem_t>(matrices[i]), sums[to + 1] += high_of<y_elem_t>(matrices[i]);
            }
        }
    }
}
#endif

// Writes the sums of a tile. When a slab goes, TMA has read the slab whose buffer is AHEAD buffers after it.
__device__ __forceinline__ void write(const Params& p, Consumer& self, const Tile& tile, Sums& sums) {
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block) {
#ifdef MOMENTS
        const Box box(p, tile, self.m + 64 * block);
#endif
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const int m = self.m + 64 * block, n = self.n + slab * SLAB, filter = tile.filter + (PIXELS_M ? n : m);
            char* const buffer = self.buffers + self.next * SLAB_BYTES;
            self.next = self.next + 1 == Y_BUFFERS ? 0 : self.next + 1;
#ifdef AFFINE_AND_RESIDUAL
            finish<AFFINE, Activation::NONE>(p, sums[block], slab * GROUPS, filter);
            self.residual.wait_for_slab();
            add(sums[block], slab * GROUPS, buffer);
            finish<Affine::NONE, ACTIVATION>(p, sums[block], slab * GROUPS, filter);
#else
            finish<AFFINE, ACTIVATION>(p, sums[block], slab * GROUPS, filter);
#endif
            fill(buffer, sums[block], slab * GROUPS);
#ifdef BY_LANES
            ptx::bar_sync(self.barrier, 128);
            store(p, tile, buffer, m, n);
#else
            ptx::fence_proxy_async_shared();
            if (self.sends) ptx::cp_async_bulk_wait_group_read<Y_BUFFERS - 1 - AHEAD>();
            ptx::bar_sync(self.barrier, 128);
            if (self.sends) {
                send(p, tile, buffer, m, n);
#ifdef AFFINE_AND_RESIDUAL
                self.residual.ask(p);
#endif
            }
#ifdef MOMENTS
            measure(p, box, buffer, filter);  // until the next slab is filled, which waits for all
#endif
#endif
        }
    }
}

}  // namespace hc::pointwise
