// The consumers of halo_sm90_wgrad_ss: products of boxes, and partial sums.
#pragma once

#include "families/halo_sm90/wgrad_ss/tile.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace hc::wgrad_ss {

using Sums = float[TAPS][M_BLOCKS][COLUMNS / 2];

// Steps after which sums go to memory and begin anew, since wgmma cuts them. Parts of a cluster have no more.
constexpr int FLUSH_STEPS = CLUSTER > 1 ? 1 << 30 : 2048;
constexpr int STEP_UNITS = DEPTH * PIXEL_BYTES / 16;  // of a descriptor, from step to step

// Descriptors of what a consumer multiplies in stage 0: dy from its first filter on, and x from its first channel on at
// each of its taps.
struct Operands {
    ptx::u64 dy[M_BLOCKS], x[TAPS];

    __device__ __forceinline__ Operands(const Params& p, const Smem& smem, const Tile& tile, const Part& part) {
        const unsigned base = ptx::shared_address(smem.stages);
#pragma unroll
        for (int i = 0; i < M_BLOCKS; ++i)
            dy[i] = ptx::smem_descriptor(base + smem.y + (part.filter / SPAN + i) * smem.y_span, smem.y_span,
                                         8 * PIXEL_BYTES, PIXEL_BYTES);
        const ptx::u64 first =
            ptx::smem_descriptor(base + part.channel / SPAN * smem.x_span, smem.x_span, 8 * PIXEL_BYTES, PIXEL_BYTES);
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
            const int tap = min(tile.tap + part.tap + i, p.taps - 1);  // sums of taps behind the last are not written
            const int r = tap / p.taps_s, s = tap - r * p.taps_s;
            const int pixels = (r * p.dil_h - first_row(p, tile)) * p.pitch + s * p.dil_w;
            x[i] = ptx::moved(first, pixels * (PIXEL_BYTES / 16));
        }
    }
};

// Adds the products of a stage, `units` from stage 0 on.
__device__ __forceinline__ void multiply_stage(Sums& sums, const Operands& operands, int units, int steps) {
    ptx::wgmma_fence();
#pragma unroll 1
    for (int step = 0; step < steps; ++step, units += STEP_UNITS)
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
            for (int i = 0; i < M_BLOCKS; ++i)
                ptx::wgmma_ss<elem_t, COLUMNS, true, true>(sums[tap][i], ptx::moved(operands.dy[i], units),
                                                           ptx::moved(operands.x[tap], units), true);
    ptx::wgmma_commit_group();
}

// Adds the sums to those of the same consumer in memory, or writes them there if they are the first: a register of 128
// threads is 512 bytes side by side. wgrad_ss_sum.cu knows the order.
__device__ __forceinline__ void write_sums(Sums& sums, float* to, bool first) {
    float* const own = &sums[0][0][0];
    to += threadIdx.x % 128;
    if (!first) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) own[i] += to[i * 128];
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) to[i * 128] = own[i];
}

// Adds the sums of the cluster's blocks, which are parts of a tile, in their order, by way of shared memory: each block
// adds one of CLUSTER fractions of the items. They are dw's, or those of the cluster's part in memory.
__device__ __forceinline__ void add_in_cluster(const Params& p, const Smem& smem, const Tile& tile, const Sums& sums,
                                               int warpgroup, float* partials) {
    constexpr int THREADS_ADD = CONSUMERS * 128;
    float* const own = reinterpret_cast<float*>(smem.stages);
    ptx::bar_sync(MULTIPLIED, THREADS_ADD);  // no consumer multiplies the stages any more
#pragma unroll
    for (int i = 0; i < SUMS; ++i) own[warpgroup * CONSUMER_SUMS + i * 128 + threadIdx.x % 128] = (&sums[0][0][0])[i];
    ptx::cluster_sync();
    const int rank = ptx::cluster_rank();
    for (int item = rank * THREADS_ADD + threadIdx.x; item < TILE_ITEMS; item += CLUSTER * THREADS_ADD) {
        Rounded rounded;
#pragma unroll
        for (int after = 0; after < RESULT_TAPS; ++after) {
            const Place place(tile, item, after);
            const float* const at = own + place.from;
            Item total;
            clear(total);
#pragma unroll
            for (int part = 0; part < CLUSTER; ++part) add(total, part == rank ? at : ptx::peer_shared(at, part));
            if (p.dw)
                mend(p, place, total);
            else
                store(partials + place.from, total);
            round(rounded, total, after);
        }
        if (p.dw) write(p, Place(tile, item, 0), rounded);
    }
    ptx::cluster_sync();  // others read this block's sums
}

__device__ __forceinline__ void settle(Sums& sums) {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < TAPS * M_BLOCKS; ++i) ptx::wgmma_hold(sums[i / M_BLOCKS][i % M_BLOCKS]);
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    Boxes boxes(p);
    const Tile tile(p.blocks, boxes.slab);
    const Part part(warpgroup);
    const Operands operands(p, smem, tile, part);
    float* const partials = p.partials + ((i64)boxes.cluster * p.cut.slabs + boxes.slab) * TILE_SUMS;
    Cursor at;
    int box = boxes.at, band = boxes.at % p.cut.bands;
    for (bool first = true; box < boxes.end; first = false) {
        Sums sums = {};
        int done = -1;  // the stage before this one: it goes back when its products are done, while those of this run
        for (int steps = 0; box < boxes.end && steps < FLUSH_STEPS; ++box, at.advance(STAGES)) {
            const int box_steps = ceil_div(min(p.box_rows, p.rows - band * p.box_rows) * p.pitch, DEPTH);
            wait(&smem.full[at.index], at.parity);
            multiply_stage(sums, operands, at.index * (smem.stage / 16), box_steps);
            ptx::wgmma_wait_group<1>();
            if (done >= 0) arrive_warp(&smem.empty[done]);
            done = at.index, steps += box_steps;
            band = band + 1 == p.cut.bands ? 0 : band + 1;
        }
        settle(sums);
        arrive_warp(&smem.empty[done]);
        if constexpr (CLUSTER > 1)
            add_in_cluster(p, smem, tile, sums, warpgroup, partials);
        else
            write_sums(sums, partials + warpgroup * CONSUMER_SUMS, first);
    }
}

}  // namespace hc::wgrad_ss
