// Multiplying: a warp takes items of a tile, M_TILES * 16 pixels by N_TILES * 8 filters of one group.
#pragma once

#include "families/halo_sm80/stage.cuh"
#include "families/halo_sm80/write.cuh"
#include "kernels/products.cuh"

namespace hc {

constexpr int HALF_BYTES = (PIXEL_PAIRS ? 1 : 8) * MOVE_W * UNIT_BYTES;  // IN_ROW: between the halves of a fragment

// What the table has for a lane's k of one slice: offsets of its words, or atom, and (TAP_PAIRS) the bits that count.
struct alignas(4 * TABLE_WORDS) Entry {
    unsigned word[TABLE_WORDS];
};

// Where a lane's operands lie in shared memory: the input at its pixels, the table and the weights at its k.
struct Operands {
    const char* x[M_TILES][IN_ROW ? 1 : 2];
    const char *table, *w;
};

using Fragments = unsigned[M_TILES][4];  // of the input, one slice

__device__ __forceinline__ Entry entry_of(const Operands& from, int slice) {
    return *reinterpret_cast<const Entry*>(from.table + slice * (SLICE_PAIRS * (int)sizeof(Entry)));
}

// A lane's words of one row, the second four k (or k pairs) after the first.
__device__ __forceinline__ Words2 load_row(const char* x, int move, const Entry& entry) {
    if (!SPLIT) return *reinterpret_cast<const Words2*>(x + entry.word[0] + move);
    Words2 words;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        words.word[i] = *reinterpret_cast<const unsigned*>(x + entry.word[SPLIT ? i : 0] + move);
        if (TAP_PAIRS) words.word[i] &= entry.word[TAP_PAIRS ? 2 + i : 0];
    }
    return words;
}

__device__ __forceinline__ void load_slice(Fragments& a, const Operands& from, const Entry& entry) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Words2 words =
                load_row(IN_ROW ? from.x[i][0] : from.x[i][half], IN_ROW ? half * HALF_BYTES : 0, entry);
            a[i][half] = words.word[0], a[i][half + 2] = words.word[1];
        }
}

__device__ __forceinline__ void multiply_slice(Sums& sums, const Fragments& a, const Operands& from, int slice,
                                               int slices) {
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
        const Words2 b = *reinterpret_cast<const Words2*>(from.w + (j * slices + slice) * SLICE_BYTES);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) mma(sums[i][j], a[i], b.word, elem_t{});
    }
}

// Zero from k = `ks` on: what lies there may be infinite. TAP_PAIRS: the table says so.
__device__ __forceinline__ void mask_slice(Fragments& a, int slice, int ks) {
    const int k = slice * (SPLIT ? 8 : 4) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < M_TILES * 4; ++i)
        if ((SPLIT && i % 4 > 1 ? k + 4 : k) >= ks) a[i / 4][i % 4] = 0;
}

// All slices of a chunk; the words of the next one come while one is multiplied.
__device__ __forceinline__ void multiply_slices(Sums& sums, const Operands& from, int slices, int ks) {
    constexpr int WHOLE = SPLIT ? 8 : 4;
    const int used = (ks + WHOLE - 1) / WHOLE;
    if (used == 0) return;
    Fragments a;
    load_slice(a, from, entry_of(from, 0));
    Entry entry = entry_of(from, used > 1 ? 1 : 0);
#pragma unroll 2
    for (int slice = 0; slice < used - 1; ++slice) {
        Fragments next;
        load_slice(next, from, entry);
        entry = entry_of(from, slice + 2 < used ? slice + 2 : 0);
        multiply_slice(sums, a, from, slice, slices);
#pragma unroll
        for (int i = 0; i < M_TILES * 4; ++i) a[i / 4][i % 4] = next[i / 4][i % 4];
    }
    if (!TAP_PAIRS && ks % WHOLE) mask_slice(a, used - 1, ks);
    multiply_slice(sums, a, from, used - 1, slices);
}

__device__ __forceinline__ Operands operands_of(const Params& p, Item item, int lead, const Tables& tables,
                                                const char* x_smem, const char* w_smem) {
    const int lane = threadIdx.x % 32;
    Operands from;
    from.table = reinterpret_cast<const char*>(tables.ks) + lane % 4 * (int)sizeof(Entry);
    from.w = w_smem + ((item.group * p.n_items.value + item.n) * N_TILES * p.slices) * SLICE_BYTES + lane * 8;
    const char* const x = x_smem + item.group * p.planes.value * p.plane_bytes + lead * UNIT_BYTES;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < (IN_ROW ? 1 : 2); ++half) from.x[i][half] = x + tables.x[row_of(item.m, i, half)];
    return from;
}

// One step: every item that the warp has in the tile, and (unless LATE) after the last chunk its outputs.
__device__ __forceinline__ void multiply_tile(Sums& sums, const Params& p, const Work& work, const Step& at,
                                              const Tables& tables, const char* x_smem, const char* w_smem) {
    const int items = p.m_items.value * p.n_items.value * p.tile_groups;
    const Output output = output_of(p, work, at.tile);
    for (int index = threadIdx.x / 32; index < items; index += WARPS) {
        const Item item = item_at(p, index);
        const Operands from = operands_of(p, item, at.lead, tables, x_smem, w_smem);
        if (at.chunk == 0) clear(sums);
        multiply_slices(sums, from, p.slices, work.ks);
        if (!LATE && at.chunk == p.chunks - 1) write_item(sums, p, work, output, tables, item);
    }
}

}  // namespace hc
