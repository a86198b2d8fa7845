// Multiplying: a warp takes items of a tile, M_TILES * 16 pixels by N_TILES * 8 filters of one group.
#pragma once

#include "halo_sm80/stage.cuh"
#include "halo_sm80/write.cuh"
#include "products.cuh"

namespace hc {

constexpr int UNROLL = M_TILES * N_TILES <= 8 ? 2 : 1;                    // slices
constexpr int HALF_BYTES = (Y_PAIRS == 2 ? 1 : 8) * MOVE_W * UNIT_BYTES;  // IN_ROW: between the halves of a fragment
constexpr int TABLE_BYTES = SLICE_PAIRS * 4 * (SPLIT ? 2 : 1);            // of a slice

// Where a lane's operands lie in shared memory: the input at its pixels, the table and the weights at its k.
struct Operands {
    const char* x[M_TILES][IN_ROW ? 1 : 2];
    const char *table, *w;
};

// A lane's words of one row and slice, the second four k (or k pairs) after the first; zero from k = `ks` on.
template <bool MASKED>
__device__ __forceinline__ Words2 load_row(const char* x, int move, Words2 offsets, int k, int ks) {
    Words2 words;
    if (SPLIT) {
        words.word[0] = *reinterpret_cast<const unsigned*>(x + offsets.word[0] + move);
        words.word[1] = *reinterpret_cast<const unsigned*>(x + offsets.word[1] + move);
    } else {
        words = *reinterpret_cast<const Words2*>(x + offsets.word[0] + move);
    }
    if (MASKED && k >= ks) words.word[0] = 0;
    if (MASKED && (SPLIT ? k + 4 : k) >= ks) words.word[1] = 0;
    return words;
}

template <bool MASKED>
__device__ __forceinline__ void multiply_slice(Sums& sums, const Operands& from, int slice, int slices, int ks) {
    Words2 offsets;
    if (SPLIT)
        offsets = *reinterpret_cast<const Words2*>(from.table + slice * TABLE_BYTES);
    else
        offsets.word[0] = *reinterpret_cast<const unsigned*>(from.table + slice * TABLE_BYTES);
    const int k = slice * (SPLIT ? 8 : 4) + threadIdx.x % 4;
    unsigned a[M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Words2 words = load_row<MASKED>(IN_ROW ? from.x[i][0] : from.x[i][half],
                                                  IN_ROW ? half * HALF_BYTES : 0, offsets, k, ks);
            a[i][half] = words.word[0], a[i][half + 2] = words.word[1];
        }
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
        const Words2 b = *reinterpret_cast<const Words2*>(from.w + (j * slices + slice) * SLICE_BYTES);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) mma(sums[i][j], a[i], b.word, elem_t{});
    }
}

__device__ __forceinline__ Operands operands_of(const Params& p, Item item, int lead, const Tables& tables,
                                                const char* x_smem, const char* w_smem) {
    const int lane = threadIdx.x % 32;
    Operands from;
    from.table = reinterpret_cast<const char*>(tables.ks) + lane % 4 * (TABLE_BYTES / 4);
    from.w = w_smem + ((item.group * p.n_items.value + item.n) * N_TILES * p.slices) * SLICE_BYTES + lane * 8;
    const char* const x = x_smem + item.group * p.planes.value * p.plane_bytes + lead * UNIT_BYTES;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < (IN_ROW ? 1 : 2); ++half) from.x[i][half] = x + tables.x[row_of(item.m, i, half)];
    return from;
}

// One step: every item that the warp has in the tile, and after the last chunk its outputs.
__device__ __forceinline__ void multiply_tile(Sums& sums, const Params& p, const Work& work, const Step& at,
                                              const Tables& tables, const char* x_smem, const char* w_smem) {
    const int items = p.m_items.value * p.n_items.value * p.tile_groups, whole = work.ks / (SPLIT ? 8 : 4);
    const Output output = output_of(p, work, at.tile);
    for (int index = threadIdx.x / 32; index < items; index += WARPS) {
        const Item item = item_at(p, index);
        const Operands from = operands_of(p, item, at.lead, tables, x_smem, w_smem);
        if (at.chunk == 0) clear(sums);
#pragma unroll UNROLL
        for (int slice = 0; slice < whole; ++slice) multiply_slice<false>(sums, from, slice, p.slices, work.ks);
        if (work.ks % (SPLIT ? 8 : 4)) multiply_slice<true>(sums, from, whole, p.slices, work.ks);
        if (at.chunk == p.chunks - 1) write_item(sums, p, work, output, tables, item);
    }
}

}  // namespace hc
