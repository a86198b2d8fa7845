// The producers of halo_sm90: input lines that TMA brings, that warps transpose or that warps load; and weights.
#pragma once

#include "families/halo_sm90/conv/boxes.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/cp_async.cuh"

#if EDGES
// With fewer registers two at once would spill.
using EdgePixels = hc::EdgePixels<elem_t, CHUNK_BYTES, SUMS_OVER_64 ? 4 : 1>;

// Of a unit whose place 0 is at column `col`: none in a row of zeros.
__device__ __forceinline__ EdgePixels edges_of(const Params& p, const Line& line, const hc::ImageRow& row, int col,
                                               const hc::UnitPixels& px) {
    EdgePixels edges{};
    if (hc::COL_EDGE == hc::Edge::ZEROS || !EdgePixels::meets(px) || row.n >= p.n || !hc::has_row(p, row.row))
        return edges;
    const int channel = threadIdx.x % 32 * EdgePixels::OF_LANE;
    const StoredRow stored(p, line, row);
    edges.row = stored.first + channel * stored.c, edges.next = int(stored.c);
    edges.channels = p.channels - line.chunk * CHUNK_ELEMS - channel;
    edges.col = col;
    edges.begin(p, px);
    return edges;
}
#endif

// A warp's first unit of a ring's lines, counted from position `at` on. The units of each ring by itself go to the
// warps one after the other: barriers tell two rounds of a slot apart, not three, so a warp must have seen a line of
// the same ring free that is less than a round before (ring's least length in shape.py). A free line of another ring
// says less, as consumers that are half a tile apart release the rings in different orders. Chunks begin with different
// warps, so that each gets as many units of a work tile.
__device__ __forceinline__ int first_unit_of_ring(const Params& p, int warp, int units, int at, int chunk) {
    const unsigned lines = at + chunk * (hc::TILES * RUNS * p.stride_h);
    const int unit = warp - int(lines % LINE_WARPS * units % LINE_WARPS);
    return unit < 0 ? unit + LINE_WARPS : unit;
}

// Pixels are neighbours: TMA brings raw tiles, one ahead if there are two, and the warp transposes them into slots.
struct RawUnit {
    Slot slot;
    hc::UnitPixels px;
    Cursor raw;
    bool begins, ends;  // the warp's units of its line
#if EDGES
    EdgePixels edges;
#endif
};

// Transposes a unit from its raw tile.
__device__ __forceinline__ void transpose_unit(const Params& p, const Smem& smem, const char* raw, int spare, u64* full,
                                               const RawUnit& unit) {
    const int slot = unit.slot.index * p.slot_bytes;
    if (unit.begins) hc::wait(&smem.control->slot_empty[unit.slot.index], unit.slot.parity ^ 1);
    hc::wait(&full[unit.raw.index], unit.raw.parity);
    const int plane_px = int(p.x_c), term_bytes = p.slot_bytes / TERMS;
    hc::transpose<CHUNK_BYTES, PLANES, TERMS, !SUMS_OVER_64>(
        reinterpret_cast<const elem_t*>(raw + unit.raw.index * RAW_BYTES), smem.slots, slot,
        SPARE_BYTES ? spare : term_bytes, unit.px, plane_px);
#pragma unroll
    for (int term = 0; X_JOINED && term < TERMS; ++term)
        hc::clear_outside<elem_t, CHUNK_BYTES, PLANES>(smem.slots + slot + term * term_bytes, unit.px, plane_px);
#if EDGES
    unit.edges.fill(p, smem.slots + slot);
#endif
    __syncwarp();
    if (!unit.ends) return;
    hc::ptx::fence_proxy_async_shared();
    hc::arrive_warp(&smem.control->slot_full[unit.slot.index]);
}

// Asks for 32 pixels of a chunk, `column` pixels behind the aligned one at or before pixel `first` of the row. A box
// has every PLANES-th channel, from the same row of other planes: where it begins there is aligned by itself.
__device__ __forceinline__ void ask_for_raw(const Params& p, const Line& line, const hc::ImageRow& row, int first,
                                            int column, char* raw, u64* full) {
    constexpr int ALIGNED = 16 / sizeof(elem_t);  // pixels
    hc::ptx::mbarrier_arrive_expect_tx(full, RAW_BYTES);
    const MappedRow mapped(p, row.row);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
        const int at = first + plane * int(p.x_c);
        hc::ptx::cp_async_bulk_tensor_5d_shared_global(raw + plane * (RAW_BYTES / PLANES), mapped.map, full,
                                                       (at & -ALIGNED) + column, X_JOINED ? 0 : mapped.row,
                                                       line.chunk * (CHUNK_ELEMS / PLANES), line.column.group, row.n);
    }
}

__device__ __forceinline__ void produce_transposed(const Params& p, const Smem& smem, int warp) {
    constexpr int ALIGNED = 16 / sizeof(elem_t);
    const int units = units_of_line(p);
    char* raw = smem.raw + warp * RAW_DEPTH * RAW_BYTES;
    const int spare = int(smem.spare - smem.slots) + warp * SPARE_BYTES;
    u64* full = smem.control->raw_full[warp];
    Cursor asked;
    RawUnit before{};  // of the units asked for the last that is not transposed
    bool has_before = false;
    const auto transpose_before = [&] {
        if (has_before) transpose_unit(p, smem, raw, spare, full, before);
    };
    int unit = warp;  // of the warp, counted from the current line on
    const auto begin = [&](int at, int chunk) { unit = first_unit_of_ring(p, warp, units, at, chunk); };
    for_each_line(p, begin, [&](const Line& line) {
        const int boxes = line.tiles == 1 ? p.single_boxes : p.boxes, first_col = hc::staged_col(p, line.column);
        for (; unit < units; unit += LINE_WARPS) {
            const int box = FLAT ? p.box_units.quotient(unit) : 0, from = box * p.box_px;
            // A line of one tile has fewer boxes: no pixel of the others is read.
            hc::ImageRow row = hc::staged_row<FLAT>(p, line.column, line.line + min(box, boxes - 1));
            row.row = hc::row_at_edge(p, row.row);
            const int first = X_JOINED ? row.row * p.w + first_col : first_col;
            const int column = (unit - box * p.box_units.value) * hc::UNIT_PX;
            if (RAW_DEPTH == 1) transpose_before();
            if (hc::ptx::elect_sync())
                ask_for_raw(p, line, row, first, column, raw + asked.index * RAW_BYTES, &full[asked.index]);
            if (RAW_DEPTH == 2) transpose_before();
            const int inside = hc::has_row(p, row.row) ? p.w - first_col : 0;
            before = {line.slot,
                      {from + column, first & (ALIGNED - 1), from, box < boxes ? from + p.box_px : from,
                       from + max(0, -first_col), from + inside},
                      asked,
                      unit < LINE_WARPS,
                      unit + LINE_WARPS >= units};
#if EDGES
            before.edges = edges_of(p, line, row, first_col - from, before.px);
#endif
            asked.advance(RAW_DEPTH);
            has_before = true;
        }
        unit -= units;
    });
    transpose_before();
}

// Units that a warp has staged and not yet announced. Loaded ones are announced at once, copied ones two units later,
// while the copies of the next two are in flight.
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

// One warp's 32 pixels of a line.
__device__ __forceinline__ void stage_unit(const Params& p, const Line& line, int unit, char* slot) {
    const int first_px = unit * hc::UNIT_PX, px = first_px + threadIdx.x % 32;
    const int channels = p.channels - line.chunk * CHUNK_ELEMS;
    const elem_t* x = chunk_of(p, line);
    const int term_bytes = p.slot_bytes / TERMS;
    const hc::Place place = hc::staged_pixel<FLAT>(p, line.column, line.line, px);
    if constexpr (COPIED)
        hc::copy_channels<elem_t, CHUNK_BYTES>(slot, first_px, p.slot_px, x, channels, place);
    else if constexpr (X_CHANNELS_INNER)
        hc::load_channels<elem_t, CHUNK_BYTES, X_VECTOR, TERMS>(slot, term_bytes, first_px, p.slot_px, x, channels,
                                                                place);
    else
        hc::load_pixels<elem_t, CHUNK_BYTES, TERMS>(slot, term_bytes, first_px, p.slot_px, x, p.x_c, channels, place);
}

__device__ __forceinline__ void produce_loaded(const Params& p, const Smem& smem, int warp) {
    const int units = units_of_line(p);
    int unit = warp;  // of the warp, counted from the current line on
    UnitsUnderWay under_way;
    const auto begin = [&](int at, int chunk) { unit = first_unit_of_ring(p, warp, units, at, chunk); };
    for_each_line(p, begin, [&](const Line& line) {
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

// A stream of weights, in the order in which its consumers multiply: for each work tile all taps of a block of filters.
// While the tensor cores run, its thread issues an instruction every 10 to 20 cycles: nothing is computed twice.
struct WeightStream {
    const Params& p;
    u64 *first_full, *full;  // of the ring, of the next stage; `stage_empty` are MAX_STAGES further on
    char *first_to, *to;
    const unsigned char *first_from, *from;  // of the block, of the next tap
    int stream, stage = 0, taps, tap = 0;
    int left = 0;  // taps of the segment that are to come; below 0 after the last segment
    unsigned parity = 0;
    hc::Segments segment;

    __device__ __forceinline__ WeightStream(const Params& p, const Smem& smem, int stream)
        : p(p),
          first_full(smem.control->stage_full + stream * STAGES),
          full(first_full),
          first_to(smem.stages + stream * STAGES * STAGE_BYTES),
          to(first_to),
          stream(stream),
          taps(p.chunks * p.taps_r * p.taps_s),
          segment(p.schedule) {}

    // Whether there is a next tap. To be asked before `advance`.
    __device__ __forceinline__ bool has_next() {
        if (left == 0) begin_segment();
        return left > 0;
    }
    __device__ __forceinline__ void begin_segment() {
        left = segment.next(p.schedule) ? segment.work_tiles * taps + p.mid_tap : -1, tap = taps;
        first_from = from =
            p.packed +
            ((i64)(segment.first.group * p.blocks + segment.first.block) * STREAMS + stream) * taps * STAGE_BYTES;
    }
    __device__ __forceinline__ void wait() { hc::wait(full + MAX_STAGES, parity ^ 1); }
    __device__ __forceinline__ bool is_free() {
        return hc::ptx::mbarrier_test_wait_parity(full + MAX_STAGES, parity ^ 1);
    }

    // Asks for the next tap's weights.
    __device__ __forceinline__ void advance() {
        hc::ptx::mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        hc::ptx::cp_async_bulk_shared_global(to, from, STAGE_BYTES, full);
        ++full, to += STAGE_BYTES, from += STAGE_BYTES;
        if (++stage == STAGES) stage = 0, parity ^= 1, full = first_full, to = first_to;
        if (--tap == 0) tap = taps, from = first_from;
        --left;
    }
};

// One thread streams the weights. With two streams it waits for neither: it tests one, then the other.
__device__ __forceinline__ void produce_weights(const Params& p, const Smem& smem) {
    WeightStream first(p, smem, 0), second(p, smem, STREAMS - 1);
    hc::ptx::griddepcontrol_wait();  // all else may begin before they are packed
    if (STREAMS == 1)
        for (; first.has_next(); first.advance()) first.wait();
    else
        while (first.left >= 0 || second.left >= 0) {
            if (first.has_next() && first.is_free()) first.advance();
            if (second.has_next() && second.is_free()) second.advance();
        }
}
