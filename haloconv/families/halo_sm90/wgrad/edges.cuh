// Pixels of the image left and right of it, in lines of x: threads write them over the zeros that stand there.
#pragma once

#include "families/halo_sm90/wgrad/fragment.cuh"
#include "families/halo_sm90/wgrad/split.cuh"
#include "kernels/ptx/barrier.cuh"

namespace hc::wgrad {

#ifdef EDGE_ROWS
static_assert(TERMS == 1, "there are no registers for terms and for outer columns");

enum {
    EDGE_ELEMS = X_INNER ? PIECE : 1,  // channels of a pixel that a thread writes at a time
    EDGE_GROUPS = BLOCK_CHANNELS / EDGE_ELEMS,
    EDGES_AT_ONCE = LOADS ? 1
    : X_INNER             ? 2
                          : 4,  // as registers allow
    STORED = 1,                 // a named barrier
};

// The row of x that a box of a run begins with.
__device__ __forceinline__ int row_of_box(const Place& place, int box) {
    return place.row + box * BOX_ROWS * place.row_step;
}

// Channels of the outer columns of a box's lines, dealt out to EDGE_THREADS threads. A thread waits long for what it
// loads: EDGES_AT_ONCE are on their way at a time, the first while their lines are, too.
struct OuterPixels {
    struct alignas(EDGE_ELEMS* SIZE) Channels {
        elem_t elem[EDGE_ELEMS];
    };
    struct Item {
        int line, column, channel;
    };

    OuterColumns columns;
    const elem_t* x;  // the tile's first channel, at row 0 and column 0 of the image
    int channels, row, first_column, count;
    Channels loaded[EDGES_AT_ONCE];

    static __device__ __forceinline__ int own() { return int(threadIdx.x % 128) - (128 - EDGE_THREADS); }

    // Of the box that begins with a row; the first are asked for.
    __device__ __forceinline__ void begin(const Params& p, const Tile& tile, const Place& place, int from_row) {
        const int channel = tile.group * p.channels + tile.channel;
        x = p.x + place.image * p.x_n + channel * p.x_c, channels = p.channels - tile.channel;
        row = from_row, first_column = column_of_x(p, tile, place);
        columns = OuterColumns::of(p, first_column, first_column + X_PITCH);
        count = max(0, min(BOX_ROWS, p.h - row)) * columns.count * EDGE_GROUPS;
        load(p, own());
    }
    __device__ __forceinline__ Item item(int i) const {
        const int pixel = i / EDGE_GROUPS, line = BOX_ROWS == 1 ? 0 : pixel / columns.count;
        return {line, columns.at(pixel - line * columns.count), i % EDGE_GROUPS * EDGE_ELEMS};
    }
    __device__ __forceinline__ void load(const Params& p, int first) {
#pragma unroll
        for (int j = 0; j < EDGES_AT_ONCE; ++j) {
            const int i = first + j * EDGE_THREADS;
            if (i >= count) return;
            const Item at = item(i);
            const int column = at_edge<COL_EDGE>(at.column, p.w);
            const elem_t* const from = x + at.channel * p.x_c + source_row(p, row + at.line) * p.x_h + column * p.x_w;
            const bool there = at.channel < channels && (unsigned)column < (unsigned)p.w;
            loaded[j] = there ? *reinterpret_cast<const Channels*>(from) : Channels{};
        }
    }
    // Writes them to lines of the ring from `to_line` on.
    __device__ __forceinline__ void store(const Params& p, const Smem& smem, int to_line) {
#pragma unroll 1
        for (int first = own(); first < count; first += EDGES_AT_ONCE * EDGE_THREADS) {
            if (first != own()) load(p, first);
#pragma unroll
            for (int j = 0; j < EDGES_AT_ONCE; ++j) {
                const int i = first + j * EDGE_THREADS;
                if (i >= count) break;
                const Item at = item(i);
                store_one(loaded[j], smem.x + (to_line + at.line) * X_LINE, at.column - first_column, at.channel);
            }
        }
    }
    static __device__ __forceinline__ void store_one(const Channels& one, char* line, int pixel, int channel) {
        if constexpr (X_INNER)
            *reinterpret_cast<Piece*>(line + Lanes::place(pixel, channel)) = staged(one.elem);
        else if constexpr (SIZE == 4)
            *reinterpret_cast<unsigned*>(line + (channel * X_PITCH + pixel) * SIZE) = to_tf32(to_acc(one.elem[0]));
        else
            *reinterpret_cast<Channels*>(line + (channel * X_PITCH + pixel) * SIZE) = one;
    }
};

// Fills the next box of x up, when TMA has brought it.
__device__ __forceinline__ void fill_box(const Params& p, const Smem& smem, Cursor& at, OuterPixels& outer) {
    wait(&smem.x_landed[at.index], at.parity);
    outer.store(p, smem, at.index * BOX_ROWS);
    ptx::mbarrier_arrive(&smem.x_full[at.index]);  // whose threads fence before TMA writes here again
    at.advance(X_STAGES);
}

// All boxes, in the order in which they are asked for.
__device__ __forceinline__ void fill_boxes(const Params& p, const Smem& smem) {
    Walk walk(p.cut);
    const Tile tile(p.blocks, walk.slab);
    Cursor at;
    for (Run run; walk.next(p.cut, run);) {
        const Place place(p, tile, run);
        for (int box = 0; box < run.bands; ++box) {
            OuterPixels outer;
            outer.begin(p, tile, place, row_of_box(place, box));
            fill_box(p, smem, at, outer);
        }
    }
}
#endif

// Writes edges of a box that all threads have stored.
__device__ __forceinline__ void write_edges(const Params& p, const Tile& tile, const Place& place, int row,
                                            const Smem& smem, int to_line) {
#ifdef EDGE_ROWS
    if constexpr (COL_EDGES) {
        OuterPixels outer;
        outer.begin(p, tile, place, row);
        if (outer.columns.count == 0) return;
        ptx::bar_sync(STORED, 128);
        outer.store(p, smem, to_line);
    }
#endif
}

}  // namespace hc::wgrad
