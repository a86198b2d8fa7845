// Strips of planes that TMA brings as boxes, with zeros where an image ends, and how threads share them.
//
// A unit is the same strip of rows of neighbouring images of a channel. A thread has ROWS rows of four columns of it, a
// tile; threads beside each other have tiles beside each other. A block does every so many-th unit of one channel of
// the output (dy in wgrad), through a ring of BUFFERS buffers.
//
// Constants: R, ROWS and BUFFERS, and those of quads.cuh.
#pragma once

#include "families/depthwise/quads.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace hc::tile {

struct Cut {
    int units, parts;          // of a channel; blocks that share them
    int images, strips, rows;  // of a unit; of a plane; of a strip
    int groups;                // tiles beside each other
    int top, left;             // padding
    int row_bytes;             // of a box of the input
    int box_bytes;             // of a unit's boxes, all that land
    int buffer_bytes;          // the same with gaps between them
};

struct Unit {
    int image, row;

    __device__ __forceinline__ Unit(const Cut& cut, int index)
        : image(index / cut.strips * cut.images), row(index % cut.strips * cut.rows) {}
};

// A thread's tile in a unit. Threads that are left over have none.
struct Place {
    int image, row, group;
    bool active;

    __device__ __forceinline__ explicit Place(const Cut& cut) {
        const int line = int(threadIdx.x) / cut.groups, tiles = cut.rows / ROWS;
        image = line / tiles, row = (line - image * tiles) * ROWS, group = int(threadIdx.x) - line * cut.groups;
        active = image < cut.images;
    }
    // Bytes from a buffer to the tile's window, which begins LEAD columns before what the first column meets.
    __device__ __forceinline__ int window(const Cut& cut) const {
        return (image * (cut.rows + R - 1) + row) * cut.row_bytes + group * (int)sizeof(Vector);
    }
};

// Asks for the box of the input that a unit reads.
__device__ __forceinline__ void ask_input(const TensorMap& map, const Cut& cut, char* buffer, ptx::u64* full,
                                          int channel, const Unit& unit) {
    ptx::cp_async_bulk_tensor_4d_shared_global(buffer, &map, full, -cut.left - LEAD, unit.row - cut.top, channel,
                                               unit.image);
}

// A block's units, from number `first` on, and their buffers. One thread asks for them: ask(buffer, barrier, unit) is
// what copies one of them.
struct Ring {
    const Cut& cut;
    char* buffers;
    ptx::u64* full;    // a barrier for each buffer
    int index, asked;  // the unit that is worked on, and the next one to ask for
    Cursor in;

    __device__ __forceinline__ Ring(const Cut& cut, char* buffers, ptx::u64* full, int first)
        : cut(cut), buffers(buffers), full(full), index(first), asked(first) {}

    template <class Ask>
    __device__ __forceinline__ void begin(Ask ask) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < BUFFERS; ++i) ptx::mbarrier_init(&full[i], 1);
            ptx::fence_mbarrier_init();
            for (int i = 0; i < BUFFERS; ++i) ask_next(i, ask);
        }
        __syncthreads();
    }
    __device__ __forceinline__ bool has() const { return index < cut.units; }
    __device__ __forceinline__ Unit unit() const { return Unit(cut, index); }

    // The present unit's buffer, when it has landed.
    __device__ __forceinline__ const char* landed() const {
        wait(&full[in.index], in.parity);
        return buffers + in.index * cut.buffer_bytes;
    }
    // All threads have read the present unit; its buffer takes another one.
    template <class Ask>
    __device__ __forceinline__ void advance(Ask ask) {
        __syncthreads();
        if (threadIdx.x == 0) ask_next(in.index, ask);
        index += cut.parts;
        in.advance(BUFFERS);
    }

  private:
    template <class Ask>
    __device__ __forceinline__ void ask_next(int buffer, Ask ask) {
        if (asked >= cut.units) return;
        ptx::mbarrier_arrive_expect_tx(&full[buffer], cut.box_bytes);
        ask(buffers + buffer * cut.buffer_bytes, &full[buffer], Unit(cut, asked));
        asked += cut.parts;
    }
};

}  // namespace hc::tile
