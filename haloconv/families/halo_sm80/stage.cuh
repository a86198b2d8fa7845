// Staging: the tables once a block, weights, and the input of a tile with its halo.
//
// Asynchronous copies, which also write the zeros of the padding; elements that lie in no order that copies know pass
// through registers, 8 bytes of a unit at a time. A thread rounds to TF32 what it has copied itself, so that no barrier
// is needed in between.
#pragma once

#include "families/halo_sm80/shape.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/fence.cuh"

namespace hc {

constexpr bool PIECES_INNER = !SPLIT && COPY_BYTES > 0;  // neighbouring threads copy neighbouring channels
constexpr bool SETTLES = sizeof(elem_t) == 4 && COPY_BYTES > 0 && !BOXES;
constexpr int UNIT_PIECES = UNIT_BYTES / PIECE_BYTES;
constexpr int GATHER_ROWS = 4;  // in flight

// Offsets of all k from a pixel's first tap; those behind the last have the first one's. TAP_PAIRS: a lane's two
// offsets of a slice, then the bits of their words that are taps.
__device__ __forceinline__ void write_ks(const Params& p, const Work& work, int* table) {
    const Axis &v = work.axes.vertical, &h = work.axes.horizontal;
    constexpr int WORDS = SPLIT ? 2 : 1;  // that a lane has of a slice
    for (int i = threadIdx.x; i < p.slices * SLICE_PAIRS * WORDS; i += THREADS) {
        const int k = SPLIT ? i / 8 * 8 + i % 2 * 4 + i / 2 % 4 : i;
        int offset = 0;
        unsigned mask = 0;
        if (k < work.ks) {
            const Place at = place_at(k, p.parts, work.axes, p.taps_first);
            const int channel = SPLIT ? at.part : at.part * PAIR_ELEMS;
            offset = channel / UNIT_ELEMS * p.plane_bytes + channel % UNIT_ELEMS * (int)sizeof(elem_t) +
                     (at.row * v.tap_move - work.low_h) * p.row_bytes +
                     (TAP_PAIRS ? at.col * 4 : (at.col * h.tap_move - work.low_w) * UNIT_BYTES);
            const int tap = 2 * at.col - first_half(h);
            mask = (tap >= 0 ? 0xffffu : 0u) | (tap + 1 < h.taps ? 0xffff0000u : 0u);
        }
        if (TAP_PAIRS)
            table[i / 2 * TABLE_WORDS + i % 2] = offset, table[i / 2 * TABLE_WORDS + 2 + i % 2] = mask;
        else
            table[i] = offset;
    }
}

// The tile's places, rows of fragments included that it does not have: where each one's first tap begins in a buffer,
// and where its pixel is in the output, from the tile's first on (-1: there is none).
__device__ __forceinline__ void write_pixels(const Params& p, const Work& work, const Tables& tables) {
    const int places = p.tile_n.value * p.tile_p.value * p.row_slots.value;
    for (int m = threadIdx.x; m < p.m_items.value * (M_TILES * 16); m += THREADS) {
        const Pixel at = pixel_of(p, m < places ? m : 0);
        tables.x[m] = at.n * p.image_bytes + at.row * p.row_move + at.col * (MOVE_W * UNIT_BYTES);
        const offset_t row = at.row * work.axes.vertical.spacing, col = at.col * work.axes.horizontal.spacing;
        const bool there = m < places && at.col < p.tile_q;
        tables.y[m] = there ? at.n * (offset_t)p.y_n + row * (offset_t)p.y_h + col * (offset_t)p.y_w : -1;
    }
}

// What a thread stages: the places below each other of one piece, from row `first` to before row `end`.
struct Column {
    char* to;            // in row 0
    const elem_t* from;  // in row 0
    int channels;        // from the piece's first on; 0: padding in every row
    int first, end;
};

// Column `index` of a tile: neighbouring threads have neighbours in memory.
__device__ __forceinline__ Column column_at(const Params& p, const Work& work, const Step& at, int index,
                                            char* buffer) {
    int rest = index, piece = 0;
    if (PIECES_INNER) rest = p.pieces.quotient(index), piece = index - rest * p.pieces.value;
    const int cols = p.cols.quotient(rest), col = rest - cols * p.cols.value;
    const int parts = p.row_parts.quotient(cols), part = cols - parts * p.row_parts.value;
    int image = parts;
    if (!PIECES_INNER) piece = p.tile_n.quotient(parts), image = parts - piece * p.tile_n.value;
    const int plane = piece / UNIT_PIECES, inside = piece % UNIT_PIECES * PIECE_BYTES;
    const int group = p.planes.quotient(plane);
    const int channel = (plane - group * p.planes.value) * UNIT_ELEMS + inside / (int)sizeof(elem_t);
    const int left = p.channels - at.chunk * p.chunk_channels - channel, w = at.w + col * STAGED_PX;
    const bool there =
        at.tile.n + image < p.n && (unsigned)w < (unsigned)p.width && work.group + group < p.groups && left > 0;
    const offset_t offset =
        image * (offset_t)p.x_n + (group * p.channels + channel) * (offset_t)p.x_c + col * STAGED_PX * (offset_t)p.x_w;
    const int first = part * p.part_rows, end = first + p.part_rows;
    return {buffer + plane * p.plane_bytes + image * p.image_bytes + col * (STAGED_PX * UNIT_BYTES) + inside,
            at.x + offset, there ? left : 0, first, end < p.rows ? end : p.rows};
}

__device__ __forceinline__ void copy(char* to, const elem_t* from, bool there) {
    if (COPY_BYTES == 16) ptx::cp_async_16(to, from, there ? 16 : 0);
    if (COPY_BYTES == 8) ptx::cp_async_8(to, from, there ? 8 : 0);
    if (COPY_BYTES == 4) ptx::cp_async_4(to, from, there ? 4 : 0);
}

__device__ __forceinline__ void copy_column(const Params& p, const Step& at, const Column& column) {
    char* to = column.to + column.first * p.row_bytes;
    const elem_t* from = column.from + column.first * (offset_t)p.x_h;
    for (int row = column.first; row < column.end; ++row) {
        const bool there = column.channels > 0 && (unsigned)(at.h + row) < (unsigned)p.h;
        copy(to, from, there);  // of nothing that is not there
        to += p.row_bytes, from += (offset_t)p.x_h;
    }
}

// Pixels of one channel that are neighbours in memory.
struct alignas(STAGED_PX * sizeof(elem_t)) Run {
    elem_t px[STAGED_PX];
};

// Their atoms, from the same pixels of neighbouring channels.
__device__ __forceinline__ void store_atoms(char* to, const Run (&run)[PAIR_ELEMS]) {
#pragma unroll
    for (int px = 0; px < STAGED_PX; ++px) {
        elem_t elem[PAIR_ELEMS];
#pragma unroll
        for (int j = 0; j < PAIR_ELEMS; ++j) elem[j] = run[j].px[px];
        *reinterpret_cast<Words2*>(to + px * UNIT_BYTES) = to_atom(elem);
    }
}

// Stages a column through registers: the loads of some rows, then their stores.
__device__ __forceinline__ void gather_column(const Params& p, const Step& at, const Column& column) {
    for (int first = column.first; first < column.end; first += GATHER_ROWS) {
        Run run[GATHER_ROWS][PAIR_ELEMS] = {};
#pragma unroll
        for (int i = 0; i < GATHER_ROWS; ++i) {
            const elem_t* const from = column.from + (first + i) * (offset_t)p.x_h;
            const bool there = first + i < column.end && (unsigned)(at.h + first + i) < (unsigned)p.h;
#pragma unroll
            for (int j = 0; j < PAIR_ELEMS; ++j)
                if (there && j < column.channels) run[i][j] = *reinterpret_cast<const Run*>(from + j * (offset_t)p.x_c);
        }
#pragma unroll
        for (int i = 0; i < GATHER_ROWS; ++i)
            if (first + i < column.end) store_atoms(column.to + (first + i) * p.row_bytes, run[i]);
    }
}

// The weights of one chunk, as they were packed.
__device__ __forceinline__ void stage_weights(const Params& p, const Work& work, int chunk, char* w_smem) {
    const i64 block =
        ((i64)work.cls * p.group_tiles + work.group / p.tile_groups) * p.filter_tiles + work.filter / p.tile_filters;
    const char* from = p.w + (block * p.chunks + chunk) * p.weight_bytes;
    for (int at = threadIdx.x * 16; at < p.weight_bytes; at += THREADS * 16)
        ptx::cp_async_16(w_smem + at, from + at, 16);
}

// The weights of the only chunk, where a block makes them itself.
__device__ __forceinline__ void make_weights(const Params& p, const Work& work, char* w_smem) {
    const int lane = threadIdx.x % 32, eights = p.tile_filters / 8;
    for (int i = threadIdx.x / 32; i < p.tile_groups * eights * p.slices; i += WARPS) {
        const int rest = i / p.slices, tile_group = rest / eights;
        const int group = work.group + tile_group;
        const int filter = work.filter + filter_of(rest - tile_group * eights, lane / 4);
        const FilterRow row = {
            reinterpret_cast<const elem_t*>(p.w) + group * p.strides.group + filter * p.strides.filter, 0, p.channels,
            group < p.groups && filter < p.filters};
        *reinterpret_cast<Words2*>(w_smem + i * SLICE_BYTES + lane * 8) =
            weights_of(p.strides, work.axes, row, p.parts, p.taps_first, i - rest * p.slices, lane % 4);
    }
}

// BOXES: the barriers of the buffers, which lie behind them. A phase ends when a tile has landed.
__device__ __forceinline__ ptx::u64* landings_of(const Params& p, char* x_smem) {
    return reinterpret_cast<ptx::u64*>(x_smem + DEPTH * p.x_bytes);
}

// Rows of fragments that the tile does not have may read on behind its planes.
__device__ __forceinline__ void begin_landings(const Params& p, char* x_smem) {
    if (!BOXES) return;
    const int planes = DEPTH * p.planes.value, gap = p.plane_bytes - p.image_bytes;
    for (int i = threadIdx.x * 4; i < planes * gap; i += THREADS * 4)
        *reinterpret_cast<unsigned*>(x_smem + i / gap * p.plane_bytes + p.image_bytes + i % gap) = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < DEPTH; ++i) ptx::mbarrier_init(&landings_of(p, x_smem)[i], 1);
        ptx::fence_mbarrier_init();
    }
    __syncwarp();  // the hardware initialises a barrier once for a warp, not by the lane that asks for its first tile
}

__device__ __forceinline__ void await_landing(const Params& p, const Work& work, int step, char* x_smem) {
    if (!BOXES || work.ks == 0) return;
    if (step == 0) __syncthreads();  // until the barriers are there
    wait(&landings_of(p, x_smem)[step % DEPTH], step / DEPTH & 1);
}

// Asks for the planes of a tile.
__device__ __forceinline__ void stage_boxes(const Params& p, const Work& work, const Step& at, char* buffer,
                                            ptx::u64* landing) {
#if BOXES
    ptx::mbarrier_arrive_expect_tx(landing, p.planes.value * p.image_bytes);
    for (int plane = 0; plane < p.planes.value; ++plane)
        ptx::cp_async_bulk_tensor_4d_shared_global(buffer + plane * p.plane_bytes, &p.x_map, landing, at.w, at.h,
                                                   at.chunk * p.chunk_channels + plane, at.tile.n);
#endif
}

// Everything that step number `step` of the block multiplies. Closes a group of copies.
__device__ __forceinline__ void stage(const Params& p, const Work& work, const Step& at, int step, char* x_smem,
                                      char* w_smem) {
    if (PACKED && (step < p.chunks || p.chunks > p.weight_buffers))
        stage_weights(p, work, at.chunk, w_smem + step % p.weight_buffers * p.weight_bytes);
    char* const buffer = x_smem + step % DEPTH * p.x_bytes;
    if (BOXES && work.ks > 0) {
        if (threadIdx.x == 0) stage_boxes(p, work, at, buffer, &landings_of(p, x_smem)[step % DEPTH]);
    } else if (work.ks > 0) {
        for (int i = threadIdx.x; i < p.columns; i += THREADS) {
            const Column column = column_at(p, work, at, i, buffer);
            if constexpr (COPY_BYTES > 0)
                copy_column(p, at, column);
            else
                gather_column(p, at, column);
        }
    }
    ptx::cp_async_commit_group();
}

// Rounds to TF32 what the thread has copied, once it has landed.
__device__ __forceinline__ void settle(const Params& p, const Work& work, const Step& at, char* buffer) {
    struct alignas(COPY_BYTES ? COPY_BYTES : 4) Copied {
        float word[COPY_BYTES ? COPY_BYTES / 4 : 1];
    };
    if (!SETTLES || work.ks == 0) return;
    for (int i = threadIdx.x; i < p.columns; i += THREADS) {
        const Column column = column_at(p, work, at, i, buffer);
#pragma unroll 2
        for (int row = column.first; row < column.end; ++row) {
            Copied& place = *reinterpret_cast<Copied*>(column.to + row * p.row_bytes);
            Copied copied = place;
#pragma unroll
            for (float& word : copied.word) word = __uint_as_float(to_tf32(word));
            place = copied;
        }
    }
}

}  // namespace hc
