// The items of a warp, and writing their sums: scale, bias, residual, activation, conversion, stores of one to four
// neighbours.
#pragma once

#include "families/halo_sm80/shape.cuh"
#include "kernels/activation.cuh"

namespace hc {

using Sums = float[M_TILES][N_TILES][4];

// An item: a group of the tile, and counts of M_TILES * 16 pixels and of N_TILES * 8 filters before it.
struct Item {
    int group, m, n;
};

__device__ __forceinline__ Item item_at(const Params& p, int index) {
    const int rest = p.m_items.quotient(index), group = p.n_items.quotient(rest);
    return {group, index - rest * p.m_items.value, rest - group * p.n_items.value};
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; ++i) sums[i / (4 * N_TILES)][i / 4 % N_TILES][i % 4] = 0;
}

// The lane's place in the tile: of fragment i, the first or second half of its rows. Stores of two pixels want them to
// be neighbours.
__device__ __forceinline__ int row_of(int item_m, int i, int half) {
    const int lane_row = threadIdx.x % 32 / 4;
    return (item_m * M_TILES + i) * 16 + (PIXEL_PAIRS ? 2 * lane_row + half : lane_row + 8 * half);
}

// Stores of two or four neighbours; 16-bit elements are rounded two at a time.
struct alignas(8) Floats2 {
    float of[2];
};

struct alignas(16) Floats4 {
    float of[4];
};

__device__ __forceinline__ void store_pair(float* to, float first, float second) {
    *reinterpret_cast<Floats2*>(to) = {first, second};
}
template <class Half>
__device__ __forceinline__ void store_pair(Half* to, float first, float second) {
    *reinterpret_cast<unsigned*>(to) = from_acc_pair<Half>(first, second);
}

__device__ __forceinline__ void store_four(float* to, const float (&sum)[4]) {
    *reinterpret_cast<Floats4*>(to) = {sum[0], sum[1], sum[2], sum[3]};
}
template <class Half>
__device__ __forceinline__ void store_four(Half* to, const float (&sum)[4]) {
    *reinterpret_cast<Words2*>(to) = {from_acc_pair<Half>(sum[0], sum[1]), from_acc_pair<Half>(sum[2], sum[3])};
}

// A tile in the output.
struct Output {
    elem_t* y;               // first pixel, first channel of the tensor
    int images, rows, cols;  // from the tile's first on, that the output has
    bool whole;              // all of the tile is inside
};

__device__ __forceinline__ Output output_of(const Params& p, const Work& work, Pixel tile) {
    const Axis &v = work.axes.vertical, &h = work.axes.horizontal;
    const i64 row = v.residue + (i64)tile.row * v.spacing, col = h.residue + (i64)tile.col * h.spacing;
    const int images = p.n - tile.n, rows = v.pixels - tile.row, cols = h.pixels - tile.col;
    return {p.y + tile.n * p.y_n + row * p.y_h + col * p.y_w, images, rows, cols,
            images >= p.tile_n.value && rows >= p.tile_p.value && cols >= p.tile_q};
}

using Offsets = offset_t[M_TILES][2];

// Where the lane's rows are in the output; negative outside.
__device__ __forceinline__ void offsets_of(Offsets& offsets, const Params& p, const Output& output,
                                           const Tables& tables, Item item) {
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) offsets[i / 2][i % 2] = tables.y[row_of(item.m, i / 2, i % 2)];
    if (output.whole) return;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        const Pixel at = pixel_of(p, row_of(item.m, i / 2, i % 2));
        const bool inside = at.n < output.images && at.row < output.rows && at.col < output.cols;
        if (!inside) offsets[i / 2][i % 2] = -1;
    }
}

// What a lane stores, in columns of FILTERS. (Variables would be globals of every kernel.)
enum {
    HALVES = PIXEL_PAIRS ? 1 : 2,                   // of a fragment's rows, whose outputs go by themselves
    FILTERS = FOUR_FILTERS ? 4 : 1 + FILTER_PAIRS,  // of one store
    NEIGHBOURS = PIXEL_PAIRS ? 2 : FILTERS,         // outputs of one store
    COLUMNS = 2 * N_TILES / FILTERS,
    COLUMN_WORDS = M_TILES * HALVES * ((NEIGHBOURS * (int)sizeof(elem_t) + 3) / 4),
    AHEAD_WORDS = N_TILES == 8 ? 8 : 16,  // registers for the residual: so much of it is read at once
    AHEAD = AHEAD_WORDS > COLUMN_WORDS ? AHEAD_WORDS / COLUMN_WORDS : 1  // columns
};

// The filter of a column, from the lane's first one on.
__device__ __forceinline__ constexpr int column_filter(int column) {
    return FILTERS > 1 ? column * FILTERS * 4 : column / 2 * 8 + column % 2;
}

// Elements of the residual where the outputs of one store go.
struct alignas(NEIGHBOURS * sizeof(elem_t)) Neighbours {
    elem_t elem[NEIGHBOURS];
};

using Added = Neighbours[COLUMNS][M_TILES][HALVES];

// RESIDUAL: before every AHEAD columns reads what is added to them, all at once. `y` is where the lane's first filter
// is written, of `left` that there are. Its addresses are computed anew for each column (renew).
__device__ __forceinline__ void read_ahead(Added& added, const Params& p, const Offsets& offsets, int column,
                                           const elem_t* y, int left) {
#if RESIDUAL
    if (column % AHEAD > 0) return;
    const elem_t* const from = p.residual + (y - p.y);
#pragma unroll
    for (int k = column; k < column + AHEAD && k < COLUMNS; ++k) {
        int filter = column_filter(k);
        ptx::renew(filter);
        const elem_t* const first = from + filter * p.y_k;
#pragma unroll
        for (int i = 0; i < M_TILES * HALVES; ++i) {
            const offset_t offset = offsets[i / HALVES][i % HALVES];
            Neighbours& to = added[k][i / HALVES][i % HALVES];
            to = {};
            if (offset >= 0 && filter < left) to = *reinterpret_cast<const Neighbours*>(first + offset);
        }
    }
#endif
}

// y of a sum: of what is added its element `place`.
__device__ __forceinline__ float y_of(float sum, const BiasAndScale& own, const Neighbours& added, int place) {
    if constexpr (RESIDUAL) return finished<AFFINE, ACTIVATION>(sum, own, to_acc(added.elem[place]));
    return finished<AFFINE, ACTIVATION>(sum, own);
}

// Stores the sums of one filter, column `e` of eight in block `j`, or (FILTER_PAIRS) of it and the next one. The host
// has seen to it that of two neighbours both are there or none.
__device__ __forceinline__ void write_filter(const Sums& sums, const Offsets& offsets, int j, int e, elem_t* y,
                                             const BiasAndScale (&own)[2], const Added& added) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const offset_t offset = offsets[i][half];
            if (offset < 0) continue;
            float first = sums[i][j][half * 2 + e], second = sums[i][j][PIXEL_PAIRS ? e + 2 : half * 2 + 1];
            const Neighbours& both = added[(2 * j + e) / FILTERS][i][half];
            first = y_of(first, own[e], both, 0), second = y_of(second, own[PIXEL_PAIRS ? e : 1], both, NEIGHBOURS - 1);
            if (FILTER_PAIRS || PIXEL_PAIRS)
                store_pair(y + offset, first, second);
            else
                y[offset] = from_acc<elem_t>(first);
        }
}

// Stores the lane's four neighbouring filters of eights 2 * pair and the next one. The host has seen to it that of four
// neighbours all are there or none.
__device__ __forceinline__ void write_fours(const Sums& sums, const Offsets& offsets, int pair, elem_t* y,
                                            const BiasAndScale (&own)[4], const Added& added) {
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        const offset_t offset = offsets[i / 2][i % 2];
        if (offset < 0) continue;
        float four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            four[e] = sums[i / 2][(2 * pair + e / 2) % N_TILES][i % 2 * 2 + e % 2];
            four[e] = y_of(four[e], own[e], added[pair][i / 2][i % 2], e);
        }
        store_four(y + offset, four);
    }
}

__device__ __forceinline__ void write_item(const Sums& sums, const Params& p, const Work& work, const Output& output,
                                           const Tables& tables, Item item) {
    const int group = work.group + item.group;
    if (group >= p.groups) return;
    const int first = work.filter + item.n * N_TILES * 8 + threadIdx.x % 4 * (FOUR_FILTERS ? 4 : 2);
    const int left = p.filters - first;
    const i64 filter = (i64)group * p.filters + first;
    elem_t* const y = output.y + filter * p.y_k;
    Offsets offsets;
    offsets_of(offsets, p, output, tables, item);
    Added added;
#pragma unroll
    for (int pair = 0; pair < (FOUR_FILTERS ? N_TILES / 2 : 0); ++pair) {
        BiasAndScale own[4] = {};
        read_ahead(added, p, offsets, pair, y, left);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (AFFINE != Affine::NONE && pair * 16 < left) own[e] = bias_and_scale(p.bias[filter + pair * 16 + e]);
        if (pair * 16 < left) write_fours(sums, offsets, pair, y + pair * 16, own, added);
    }
#pragma unroll
    for (int j = 0; j < (FOUR_FILTERS ? 0 : N_TILES); ++j) {
        BiasAndScale own[2] = {};
#pragma unroll
        for (int e = 0; e < (FILTER_PAIRS ? 1 : 2); ++e) read_ahead(added, p, offsets, (2 * j + e) / FILTERS, y, left);
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (AFFINE != Affine::NONE && j * 8 + e < left) own[e] = bias_and_scale(p.bias[filter + j * 8 + e]);
#pragma unroll
        for (int e = 0; e < (FILTER_PAIRS ? 1 : 2); ++e) {
            int own_filter = j * 8 + e;
            if constexpr (RESIDUAL) ptx::renew(own_filter);
            if (j * 8 + e < left) write_filter(sums, offsets, j, e, y + own_filter * p.y_k, own, added);
        }
    }
}

// LATE: those of the warp's only item.
__device__ __forceinline__ void write_late(const Sums& sums, const Params& p, const Work& work, Pixel tile,
                                           const Tables& tables) {
    const int index = threadIdx.x / 32;
    if (index >= p.m_items.value * p.n_items.value * p.tile_groups) return;
    write_item(sums, p, work, output_of(p, work, tile), tables, item_at(p, index));
}

}  // namespace hc
