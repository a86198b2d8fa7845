// The producer of halo_sm90_wgrad_ss: one thread that asks TMA for boxes of x and of dy.
#pragma once

#include "families/halo_sm90/wgrad_ss/tile.cuh"
#include "kernels/ptx/barrier.cuh"

namespace hc::wgrad_ss {

__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    const int bytes = (X_SPANS * p.x_filled + Y_SPANS * p.y_filled) * PIXEL_BYTES;
    Boxes boxes(p);
    const Tile tile(p.blocks, boxes.slab);
    const int top = first_row(p, tile) - p.pad_top;
    Cursor at;
    for (Run run; boxes.next(p.cut, run);) {
        const int x_column = run.strip * p.strip_cols - p.pad_left;
        const int y_column = run.strip * p.y_column, y_strip = run.strip * p.y_strip;
        for (int box = run.first; box < run.first + run.bands; ++box, at.advance(STAGES)) {
            wait(&smem.empty[at.index], at.parity ^ 1);
            ptx::u64* const full = &smem.full[at.index];
            char* const x = smem.stages + at.index * smem.stage;
            const int row = box * p.box_rows;
            ptx::mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll 1
            for (int span = 0; span < X_SPANS; ++span)
                ptx::cp_async_bulk_tensor_4d_shared_global(x + span * smem.x_span, &p.x_map, full,
                                                           tile.channel + span * SPAN, x_column, row + top, run.image);
#pragma unroll 1
            for (int span = 0; span < Y_SPANS; ++span)
                ptx::cp_async_bulk_tensor_5d_shared_global(x + smem.y + span * smem.y_span, &p.y_map, full,
                                                           tile.filter + span * SPAN, y_column, y_strip, row,
                                                           run.image);
        }
    }
}

}  // namespace hc::wgrad_ss
