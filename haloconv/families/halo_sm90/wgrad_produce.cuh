// The producers of halo_sm90_wgrad: lines of x and of dy, by TMA or by loads.
#pragma once

#include "families/halo_sm90/piece.cuh"
#include "families/halo_sm90/swizzle.cuh"
#include "families/halo_sm90/wgrad_tile.cuh"
#include "kernels/ptx/barrier.cuh"

namespace hc::wgrad {

// Asks TMA for a row of x from column `column` on: the tile's channels.
__device__ __forceinline__ void ask_for_x(const Params& p, const Tile& tile, char* to, ptx::u64* full, int image,
                                          int row, int column) {
    const int channel = tile.group * p.channels + tile.channel;
    ptx::mbarrier_arrive_expect_tx(full, X_BYTES);
    if constexpr (X_INNER) {
        for (int span = 0; span < BLOCK_CHANNELS / X_SPAN; ++span)
            ptx::cp_async_bulk_tensor_4d_shared_global(to + span * X_PITCH * X_ROW_BYTES, &p.x_map, full,
                                                       channel + span * X_SPAN, column, row, image);
    } else {
        ptx::cp_async_bulk_tensor_4d_shared_global(to, &p.x_map, full, column, row, channel, image);
    }
}

// The same for `pixels` columns of a row of dy: the tile's filters.
__device__ __forceinline__ void ask_for_dy(const Params& p, const Tile& tile, char* to, ptx::u64* full,
                                           const Place& place, int row) {
    const int filter = tile.group * p.filters + tile.filter, pixels = place.pixels(p);
    const int boxes = Y_INNER ? Y_BOXES : (pixels + Y_SPAN - 1) / Y_SPAN;  // what is behind the last pixel is not read
    ptx::mbarrier_arrive_expect_tx(full, boxes * Y_SPAN_BYTES);
    for (int box = 0; box < boxes; ++box)
        if (Y_INNER)
            ptx::cp_async_bulk_tensor_4d_shared_global(to + box * Y_SPAN_BYTES, &p.y_map, full, filter + box * Y_SPAN,
                                                       place.column, row, place.image);
        else
            ptx::cp_async_bulk_tensor_4d_shared_global(to + box * Y_SPAN_BYTES, &p.y_map, full,
                                                       place.column + box * Y_SPAN, row, filter, place.image);
}

// One thread asks for all lines, in the order in which the consumers read them.
__device__ __forceinline__ void ask_for_lines(const Params& p, const Smem& smem) {
    Walk walk(p.cut);
    const Tile tile(p, walk.slab);
    Cursor x_at, y_at;
    for (Run run; walk.next(p.cut, run);) {
        const Place place(p, tile, run);
        for (int line = 0; line < run.bands + ROWS - 1; ++line, y_at.advance(Y_STAGES)) {
            const int dy_row = place.dy_row + line * p.dil_h, x_line = line - (ROWS - 1);
            wait(&smem.y_empty[y_at.index], y_at.parity ^ 1);
            if ((unsigned)dy_row < (unsigned)p.rows)
                ask_for_dy(p, tile, smem.y + y_at.index * Y_BYTES, &smem.y_full[y_at.index], place, dy_row);
            else
                ptx::mbarrier_arrive(&smem.y_full[y_at.index]);  // nobody reads it
            if (x_line < 0) continue;
            const int row = place.row + x_line * p.dil_h;
            wait(&smem.x_empty[x_at.index], x_at.parity ^ 1);
            if (row < p.h)
                ask_for_x(p, tile, smem.x + x_at.index * X_BYTES, &smem.x_full[x_at.index], place.image, row,
                          place.column + tile.first_column(p) - tile.lead(p));
            else
                ptx::mbarrier_arrive(&smem.x_full[x_at.index]);
            x_at.advance(X_STAGES);
        }
    }
}

__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    if (threadIdx.x / 32 != CONSUMER_WARPS) return;
    if (ptx::elect_sync()) ask_for_lines(p, smem);
}

}  // namespace hc::wgrad
