// Rows of channels_last images that land in shared memory box by box, for kernels whose lanes are channels.
//
// A slab is WARPS_C times 32 neighbouring channels. Of a slab the output (dy in wgrad) is cut into images, strips of
// columns and rows. Of all rows, in this order, each of the slab's blocks takes as many and goes down its
// strips, some rows at a time. Blocks of neighbouring slabs run at a time: what they touch lies beside each other.
//
// Constants: R and S; ROWS by COLS pixels of a thread; WARPS_C and WARPS_R, warps beside each other in channels and in
// rows. How many there are in columns is known at run time.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace hc::lanes {

constexpr int SLAB = 32 * WARPS_C, PIXEL_BYTES = SLAB * (int)sizeof(float);
constexpr int WINDOW = COLS + S - 1;       // columns that a thread reads of a row
constexpr int STEP_ROWS = ROWS * WARPS_R;  // rows of a block at a time
constexpr int MOST_STAGES = 64;

struct Cut {
    int slabs, images, strips, rows;  // rows of an image
    int per_block, longer;            // steps of STEP_ROWS of a block; blocks of a slab that have one more
    int cols, in_rows;                // of an image; rows of that whose halo is read
    int top, left;                    // padding
    int warps_q;                      // warps beside each other in a strip
    int stages, stage_bytes;          // buffers of rows
};

// Neighbouring rows of a strip. Whole steps of them read `reads` rows, from row `in_row` of the image on.
struct Run {
    int image, strip, first, rows;

    __device__ __forceinline__ int in_row(const Cut& cut) const { return first - cut.top; }
    __device__ __forceinline__ int reads() const { return (rows + STEP_ROWS - 1) / STEP_ROWS * STEP_ROWS + R - 1; }
};

// The rows of a block, run by run.
struct Walk {
    int slab, part;  // the block's number among those of its slab
    int at, end;     // rows

    __device__ __forceinline__ bool next(const Cut& cut, Run& run) {
        if (at >= end) return false;
        const int strip = at / cut.rows, left = (strip + 1) * cut.rows - at, own = end - at;
        run.image = strip / cut.strips, run.strip = strip - run.image * cut.strips;
        run.first = at - strip * cut.rows, run.rows = left < own ? left : own;
        at += run.rows;
        return true;
    }
};

__device__ __forceinline__ Walk own_walk(const Cut& cut) {
    const int part = blockIdx.x / (unsigned)cut.slabs, longer = part < cut.longer ? part : cut.longer;
    const int at = (part * cut.per_block + longer) * STEP_ROWS,
              count = (cut.per_block + (part < cut.longer)) * STEP_ROWS;
    const int all = cut.images * cut.strips * cut.rows;
    return {int(blockIdx.x) - part * cut.slabs, part, at, at + count < all ? at + count : all};
}

// A thread's channel, and its first row of a step and column of a strip.
struct Place {
    int lane, channel, row, col;  // lane: of the slab

    __device__ __forceinline__ Place(const Cut& cut, int slab) {
        const int warp = threadIdx.x / 32, rest = warp / WARPS_C;
        lane = warp % WARPS_C * 32 + threadIdx.x % 32, channel = slab * SLAB + lane;
        row = WARPS_R > 1 ? rest / cut.warps_q * ROWS : 0;
        col = (WARPS_R > 1 ? rest % cut.warps_q : rest) * COLS;
    }
};

// The barriers of the buffers: rows that have landed, and that all warps have read; and of what took the place of the
// last buffers at first.
struct Ring {
    ptx::u64 full[MOST_STAGES], empty[MOST_STAGES], spare;
};

// Warps of a block that multiply. One more, the last, asks for rows.
__device__ __forceinline__ int readers() { return blockDim.x / 32 - 1; }

// Whether this is that warp: by an exchange, from which the compiler knows that a warp stays together.
__device__ __forceinline__ bool asks() { return __shfl_sync(0xffffffffu, int(threadIdx.x / 32), 0) == readers(); }

// The asking warp makes the barriers and does not wait; the readers wait for it, and for each other.
__device__ __forceinline__ void begin(Ring& ring, const Cut& cut) {
    for (int i = 0; i < cut.stages; ++i) {
        ptx::mbarrier_init(&ring.full[i], 1);
        ptx::mbarrier_init(&ring.empty[i], readers());
    }
    ptx::mbarrier_init(&ring.spare, readers());
    ptx::fence_mbarrier_init();
}
__device__ __forceinline__ void announce_barriers() { ptx::bar_arrive(1, blockDim.x); }
__device__ __forceinline__ void wait_for_barriers() { ptx::bar_sync(1, blockDim.x); }

// The thread that asks for all rows of a block, by copy(stage, barrier, slab, run, row).
template <class Copy>
__device__ __forceinline__ void ask(Ring& ring, const Cut& cut, char* stages, Copy copy) {
    Walk walk = own_walk(cut);
    Cursor to;
    Run run;
    while (walk.next(cut, run))
#pragma unroll 1
        for (int row = 0; row < run.reads(); ++row, to.advance(cut.stages)) {
            wait(&ring.empty[to.index], to.parity ^ 1);
            copy(stages + to.index * cut.stage_bytes, &ring.full[to.index], walk.slab, run, row);
        }
}

// What a warp knows of the ring.
struct Reader {
    int first = 0;      // stage of the run's first row that is still there
    Cursor next;        // stage of the next row to land
    int landed, freed;  // rows of the run

    __device__ __forceinline__ void begin_run() { landed = freed = 0; }
    // Waits for the run's first `rows` rows.
    __device__ __forceinline__ void wait_for(Ring& ring, const Cut& cut, int rows) {
#pragma unroll 1
        for (; landed < rows; ++landed, next.advance(cut.stages)) wait(&ring.full[next.index], next.parity);
    }
    // The run's first `rows` rows are no longer needed.
    __device__ __forceinline__ void free(Ring& ring, const Cut& cut, int rows) {
        __syncwarp();
#pragma unroll 1
        for (; freed < rows; ++freed) {
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&ring.empty[first]);
            if (++first == cut.stages) first = 0;
        }
    }
    // The stage of the run's row `row`, which has landed.
    __device__ __forceinline__ int stage(const Cut& cut, int row) const {
        const int at = first + row - freed;
        return at < cut.stages ? at : at - cut.stages;
    }
};

}  // namespace hc::lanes
