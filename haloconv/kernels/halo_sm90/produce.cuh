// The producers of halo_sm90: input lines by the copy engine, turned on the way or loaded, and weights.
#pragma once

#include "halo_sm90/shape.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/tensor_map.cuh"

// What a slot is to hold: line `line` of a column, or (FLAT) the rows from there on that meet `tiles` tiles.
struct Line {
    Tile column;
    int line, tiles, chunk;
    Slot slot;
};

// Calls stage(line) for the lines of all segments, in the order in which the consumers read them.
template <class Stage>
__device__ __forceinline__ void for_each_line(const Params& p, const Stage& stage) {
    int at = 0;  // of the ring: of the segment's first line (keeps), or of the next one
    for (hc::Segments segment(p); segment.steps > 0; segment.advance(p)) {
        const int first_tile = hc::STEP_TILES * segment.first.step,
                  first_line = hc::lines_of<RUNS>(p, first_tile, 1, 0, 1).first;
        for (int step = 0; step <= segment.steps; ++step)
            for (int i = p.first_phase; i < (step < segment.steps ? 2 : 1); ++i) {
                const hc::Phase phase(p, i, step, segment.steps);
                const hc::LineRange lines = staged_lines(p, phase, i, step, segment.steps);
                const int first_row = FLAT ? p.pitch.quotient((first_tile + phase.first_tile) * TILE_PX) : 0;
                for (int chunk = phase.chunk; chunk < phase.chunk_end; ++chunk)
                    for (int line = lines.first; line < lines.end; ++line) {
                        const Slot slot(p, p.keeps ? at + line : at++, chunk);
                        stage(Line{segment.first, FLAT ? first_row : first_line + line, phase.tiles, chunk, slot});
                    }
            }
        if (p.keeps) at += lines_of_tiles(p, hc::STEP_TILES * segment.steps, segment.steps);
    }
}

// Channels are neighbours: the copy engine fills the slots. One warp asks, a lane for each box.
__device__ __forceinline__ void produce_boxes(const Params& p, const Smem& smem) {
    const int lane = threadIdx.x % 32, bytes = p.box_px * CHUNK_BYTES;
    for_each_line(p, [&](const Line& line) {
        u64* full = &smem.control->slot_full[line.slot.index];
        const int boxes = line.tiles == 1 ? p.single_boxes : p.boxes;
        hc::wait(&smem.control->slot_empty[line.slot.index], line.slot.parity ^ 1);
        if (lane == 0) hc::ptx::mbarrier_arrive_expect_tx(full, boxes * bytes);
        __syncwarp();
        for (int box = lane; box < boxes; box += 32) {
            const hc::ImageRow row = hc::staged_row<FLAT>(p, line.column, line.line + (FLAT ? box : 0));
            const int col = hc::staged_col(p, line.column) + (FLAT ? 0 : box * p.box_px);
            hc::ptx::cp_async_bulk_tensor_5d_shared_global(smem.slots + line.slot.index * p.slot_bytes + box * bytes,
                                                           &p.x_map, full, line.chunk * CHUNK_ELEMS,
                                                           line.column.block / p.blocks, col, row.row, row.n);
        }
    });
}

// Pixels are neighbours: the copy engine brings raw tiles, one ahead, and the warp turns them into slots.
struct RawUnit {
    Slot slot;
    hc::UnitPixels px;
    bool begins, ends;  // the warp's units of its line
};

// Turns the unit in `raw`, which `full` announces.
__device__ __forceinline__ void turn_unit(const Params& p, const Smem& smem, const char* raw, u64* full,
                                          unsigned parity, const RawUnit& unit) {
    char* slot = smem.slots + unit.slot.index * p.slot_bytes;
    if (unit.begins) hc::wait(&smem.control->slot_empty[unit.slot.index], unit.slot.parity ^ 1);
    hc::wait(full, parity);
    hc::turn<CHUNK_BYTES, !WIDE>(reinterpret_cast<const elem_t*>(raw), slot, unit.px);
    if (X_JOINED) hc::clear_outside<CHUNK_BYTES>(slot, unit.px);
    __syncwarp();
    if (!unit.ends) return;
    hc::ptx::fence_proxy_async_shared();
    hc::arrive_warp(&smem.control->slot_full[unit.slot.index]);
}

__device__ __forceinline__ void produce_turned(const Params& p, const Smem& smem, int warp) {
    constexpr int ALIGNED = 16 / sizeof(elem_t);  // pixels
    const int units = units_of_line(p), lane = threadIdx.x % 32;
    char* raw = smem.raw + warp * RAW_DEPTH * RAW_BYTES;
    u64* full = smem.control->raw_full[warp];
    Cursor asked;
    RawUnit before{};  // in the tile that is not asked for
    bool has_before = false;
    const auto turn_before = [&] {
        if (has_before)
            turn_unit(p, smem, raw + (asked.index ^ 1) * RAW_BYTES, &full[asked.index ^ 1],
                      asked.parity ^ (asked.index == 0), before);
    };
    int unit = warp;  // of the warp, counted from the current line on
    for_each_line(p, [&](const Line& line) {
        const int boxes = line.tiles == 1 ? p.single_boxes : p.boxes, first_col = hc::staged_col(p, line.column);
        for (; unit < units; unit += LINE_WARPS) {
            const int box = FLAT ? p.box_units.quotient(unit) : 0, from = box * p.box_px;
            // A line of one tile has fewer boxes: no pixel of the others is read.
            const hc::ImageRow row = hc::staged_row<FLAT>(p, line.column, line.line + min(box, boxes - 1));
            const int first = X_JOINED ? row.row * p.w + first_col : first_col, shift = first & (ALIGNED - 1);
            const int in_box = (unit - box * p.box_units.value) * hc::UNIT_PX - shift;
            if (lane == 0) {
                hc::ptx::mbarrier_arrive_expect_tx(&full[asked.index], RAW_BYTES);
                hc::ptx::cp_async_bulk_tensor_5d_shared_global(
                    raw + asked.index * RAW_BYTES, &p.x_map, &full[asked.index], first + in_box, X_JOINED ? 0 : row.row,
                    line.chunk * CHUNK_ELEMS, line.column.block / p.blocks, row.n);
            }
            turn_before();
            asked.advance(RAW_DEPTH);
            const int inside = (unsigned)row.row < (unsigned)p.h ? p.w - first_col : 0;
            before = {
                line.slot,
                {from + in_box, from, box < boxes ? from + p.box_px : from, from + max(0, -first_col), from + inside},
                unit < LINE_WARPS,
                unit + LINE_WARPS >= units};
            has_before = true;
        }
        unit -= units;
    });
    turn_before();
}

// Units that a warp has staged and not yet announced. Loaded ones are announced at once, copied ones two units later.
struct UnitsUnderWay {
    u64 *older = nullptr, *newer = nullptr;  // their lines' barriers

    // What a warp wrote, or what its copies brought, is read by wgmma: through the fence, then the barrier.
    static __device__ __forceinline__ void announce(u64* full) {
        hc::ptx::fence_proxy_async_shared();
        hc::arrive_warp(full);
    }
    __device__ __forceinline__ void add(u64* full) {
        if constexpr (COPIED) {
            hc::ptx::cp_async_commit_group();
            hc::ptx::cp_async_wait_group<2>();
            if (older) announce(older);
            older = newer, newer = full;
        } else {
            announce(full);
        }
    }
    __device__ __forceinline__ void finish() {
        hc::ptx::cp_async_wait_group<0>();
        if (older) announce(older);
        if (newer) announce(newer);
        older = newer = nullptr;
    }
};

// The channels of a line's chunk, of image 0 at pixel (0, 0).
__device__ __forceinline__ const elem_t* chunk_of(const Params& p, const Line& line) {
    return p.x + ((i64)(line.column.block / p.blocks) * p.channels + line.chunk * CHUNK_ELEMS) * p.x_c;
}

// One warp's 32 pixels of a line.
__device__ __forceinline__ void stage_unit(const Params& p, const Line& line, int unit, char* slot) {
    const int first_px = unit * hc::UNIT_PX, px = first_px + threadIdx.x % 32;
    const int channels = p.channels - line.chunk * CHUNK_ELEMS;
    const elem_t* x = chunk_of(p, line);
    const hc::Place place = hc::staged_pixel<FLAT>(p, line.column, line.line, px);
    if constexpr (COPIED)
        hc::copy_channels<elem_t, CHUNK_BYTES>(slot, first_px, p.slot_px, x, channels, place);
    else if constexpr (X_CHANNELS_INNER)
        hc::load_channels<elem_t, CHUNK_BYTES, X_VECTOR>(slot, first_px, p.slot_px, x, channels, place);
    else
        hc::load_pixels<elem_t, CHUNK_BYTES>(slot, first_px, p.slot_px, x, p.x_c, channels, place);
}

// Copies 32 pixels of a line, from `first_px` on, into a raw tile: by pieces, or by pairs where the row ends within a
// piece. Widths are even.
__device__ __forceinline__ void copy_unit(const Params& p, const Line& line, int first_px, char* raw) {
    const int channels = p.channels - line.chunk * CHUNK_ELEMS, lane = threadIdx.x % 32;
    const elem_t* x = chunk_of(p, line);
    const int first_col = hc::staged_col(p, line.column) + first_px;
    const bool cut = PIECE_PX > 2 && ((first_col < 0 && first_col + hc::UNIT_PX > 0) || first_col + hc::UNIT_PX > p.w);
    if (cut)
        hc::copy_pieces<elem_t, CHUNK_BYTES, 2>(raw, x, p.x_c, channels,
                                                hc::staged_in_row(p, line.column, line.line, first_px + lane % 16 * 2));
    else
        hc::copy_pieces<elem_t, CHUNK_BYTES, PIECE_PX>(
            raw, x, p.x_c, channels,
            hc::staged_in_row(p, line.column, line.line, first_px + lane % (32 / PIECE_PX) * PIECE_PX));
    hc::ptx::cp_async_commit_group();
}

// Pixels are neighbours, but the copy engine takes neither their rows nor their planes: a warp copies pieces of them
// into its raw tile while the slot is still read, and turns them.
__device__ __forceinline__ void produce_pieces(const Params& p, const Smem& smem, int warp) {
    const int units = units_of_line(p);
    char* raw = smem.raw + warp * RAW_BYTES;
    int unit = warp;  // of the warp, counted from the current line on
    for_each_line(p, [&](const Line& line) {
        const int row = hc::staged_row<false>(p, line.column, line.line).row;
        const int shift = (row * int(p.x_h) + hc::staged_col(p, line.column)) & (PIECE_PX - 1);
        for (; unit < units; unit += LINE_WARPS) {
            const int first_px = unit * hc::UNIT_PX - shift;
            copy_unit(p, line, first_px, raw);
            hc::wait(&smem.control->slot_empty[line.slot.index], line.slot.parity ^ 1);
            hc::ptx::cp_async_wait_group<0>();
            __syncwarp();
            hc::turn<CHUNK_BYTES, false>(reinterpret_cast<const elem_t*>(raw),
                                         smem.slots + line.slot.index * p.slot_bytes,
                                         {first_px, 0, p.slot_px, 0, p.slot_px});
            UnitsUnderWay::announce(&smem.control->slot_full[line.slot.index]);
        }
        unit -= units;
    });
}

__device__ __forceinline__ void produce_loaded(const Params& p, const Smem& smem, int warp) {
    const int units = units_of_line(p);
    int unit = warp;  // of the warp, counted from the current line on
    UnitsUnderWay under_way;
    for_each_line(p, [&](const Line& line) {
        for (; unit < units; unit += LINE_WARPS) {
            u64* empty = &smem.control->slot_empty[line.slot.index];
            if (!__all_sync(~0u, hc::ptx::mbarrier_try_wait_parity(empty, line.slot.parity ^ 1))) {
                under_way.finish();  // the consumers may need these to go on
                hc::wait(empty, line.slot.parity ^ 1);
            }
            stage_unit(p, line, unit, smem.slots + line.slot.index * p.slot_bytes);
            under_way.add(&smem.control->slot_full[line.slot.index]);
        }
        unit -= units;
    });
    under_way.finish();
}

// A stream of weights, in the order in which its consumers multiply.
struct WeightStream {
    const Params& p;
    Control& control;
    char* stages;
    int stream;
    hc::Segments segment;
    Cursor stage;
    int tap = 0, done = 0;  // of the filter; of the segment

    __device__ __forceinline__ WeightStream(const Params& p, const Smem& smem, int stream)
        : p(p), control(*smem.control), stages(smem.stages), stream(stream), segment(p) {}

    __device__ __forceinline__ bool more() const { return segment.steps > 0; }
    __device__ __forceinline__ void wait() {
        hc::wait(&control.stage_empty[stream * p.stages + stage.index], stage.parity ^ 1);
    }

    // Asks for the next tap's weights if a stage is free.
    __device__ __forceinline__ void advance() {
        const int index = stream * p.stages + stage.index, taps = p.chunks * p.taps_r * p.taps_s;
        if (!more() || !hc::ptx::mbarrier_test_wait_parity(&control.stage_empty[index], stage.parity ^ 1)) return;
        u64* full = &control.stage_full[index];
        hc::ptx::mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        hc::ptx::cp_async_bulk_shared_global(
            stages + index * STAGE_BYTES,
            p.packed + ((i64)(segment.first.block * STREAMS + stream) * taps + tap) * STAGE_BYTES, STAGE_BYTES, full);
        stage.advance(p.stages);
        if (++tap == taps) tap = 0;
        if (++done < segment.steps * taps + p.mid_tap) return;
        segment.advance(p);
        tap = done = 0;
    }
};

// One thread streams the weights. With two streams it waits for neither: it asks them in turns.
__device__ __forceinline__ void produce_weights(const Params& p, const Smem& smem) {
    WeightStream first(p, smem, 0), second(p, smem, STREAMS - 1);
    while (first.more() || (STREAMS == 2 && second.more())) {
        if (STREAMS == 1) first.wait();
        first.advance();
        if (STREAMS == 2) second.advance();
    }
}
