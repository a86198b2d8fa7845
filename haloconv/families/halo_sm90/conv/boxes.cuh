// The producer of halo_sm90 where channels are neighbours: lines that TMA brings right into their slots.
#pragma once

#include "families/halo_sm90/conv/lines.cuh"
#include "kernels/ptx/fence.cuh"

// Asks for a line of so many boxes.
__device__ __forceinline__ void ask_for_boxes(const Params& p, const Smem& smem, const Line& line, int boxes, int bytes,
                                              u64* full) {
    hc::ptx::mbarrier_arrive_expect_tx(full, boxes * bytes);
    for (int box = 0; box < boxes; ++box) {
        const hc::ImageRow row = hc::staged_row<FLAT>(p, line.column, line.line + (FLAT ? box : 0));
        const int col = hc::staged_col(p, line.column) + (FLAT ? 0 : box * p.box_px);
        const MappedRow mapped(p, hc::row_at_edge(p, row.row));
        hc::ptx::cp_async_bulk_tensor_5d_shared_global(smem.slots + line.slot.index * p.slot_bytes + box * bytes,
                                                       mapped.map, full, line.chunk * CHUNK_ELEMS, line.column.group,
                                                       col, mapped.row, row.n);
    }
}

// Channels are neighbours: TMA fills the slots, and one thread asks for its boxes.
__device__ __forceinline__ void produce_boxes(const Params& p, const Smem& smem) {
    const int bytes = p.box_px * CHUNK_BYTES;
    const auto begin = [](int, int) {};  // it stages all lines
    for_each_line(p, begin, [&](const Line& line) {
        u64* full = &smem.control->slot_full[line.slot.index];
        const int boxes = line.tiles == 1 ? p.single_boxes : p.boxes;
        hc::wait(&smem.control->slot_empty[line.slot.index], line.slot.parity ^ 1);
        ask_for_boxes(p, smem, line, boxes, bytes, full);
    });
}

#if EDGES
// A line whose boxes are under way: its row, channels left from its chunk on, pixels (0: a row of zeros), and the
// column of the first one.
struct BoxedLine {
    Slot slot;
    Cursor boxes;
    const elem_t* row;
    i64 next;  // elements to the next column
    int channels, pixels, col;
};

// Writes pixels of the image over the zeros left and right of it, lanes neighbouring pieces.
__device__ __forceinline__ void write_edges(const Params& p, char* slot, const BoxedLine& line) {
    constexpr int PIECES = CHUNK_BYTES / 16, ELEMS = 16 / sizeof(elem_t);
    struct alignas(16) Channels {
        elem_t elem[ELEMS];
    };
    const auto columns = hc::OuterColumns::of(p, line.col, line.col + line.pixels);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < columns.count * PIECES; i += 32) {
        const int col = columns.at(i / PIECES), piece = i % PIECES, from = hc::at_edge<hc::COL_EDGE>(col, p.w);
        Channels loaded = {};
        if ((unsigned)from < (unsigned)p.w && piece * ELEMS < line.channels)
            loaded = *reinterpret_cast<const Channels*>(line.row + from * line.next + piece * ELEMS);
        hc::store_piece<1>(slot + hc::unit_offset<CHUNK_BYTES>(col - line.col, piece), 0, loaded.elem);
    }
}

// produce_boxes by a warp that writes edges: those of a line when the next one is asked for.
__device__ __forceinline__ void produce_boxes_and_edges(const Params& p, const Smem& smem) {
    const int bytes = p.box_px * CHUNK_BYTES;
    Cursor asked;
    BoxedLine before;  // of the lines asked for the last that is not announced
    bool has_before = false;
    const auto announce_before = [&] {
        if (!has_before) return;
        hc::wait(&smem.control->raw_full[before.boxes.index][0], before.boxes.parity);
        write_edges(p, smem.slots + before.slot.index * p.slot_bytes, before);
        hc::ptx::fence_proxy_async_shared();
        hc::arrive_warp(&smem.control->slot_full[before.slot.index]);
        has_before = false;
    };
    const auto begin = [](int, int) {};
    for_each_line(p, begin, [&](const Line& line) {
        u64* empty = &smem.control->slot_empty[line.slot.index];
        const int boxes = line.tiles == 1 ? p.single_boxes : p.boxes;
        if (!__all_sync(~0u, hc::ptx::mbarrier_try_wait_parity(empty, line.slot.parity ^ 1))) {
            announce_before();  // the consumers may need it to go on
            hc::wait(empty, line.slot.parity ^ 1);
        }
        if (hc::ptx::elect_sync()) ask_for_boxes(p, smem, line, boxes, bytes, &smem.control->raw_full[asked.index][0]);
        announce_before();
        hc::ImageRow row = hc::staged_row<FLAT>(p, line.column, line.line);
        row.row = hc::row_at_edge(p, row.row);
        const StoredRow stored(p, line, row);
        before = {line.slot,
                  asked,
                  stored.first,
                  stored.w,
                  p.channels - line.chunk * CHUNK_ELEMS,
                  hc::has_row(p, row.row) ? boxes * p.box_px : 0,
                  hc::staged_col(p, line.column)};
        asked.advance(BOXES_AHEAD);
        has_before = true;
    });
    announce_before();
}
#endif

__device__ __forceinline__ void produce_boxed(const Params& p, const Smem& smem) {
#if EDGES
    if constexpr (BOXED_EDGES) return produce_boxes_and_edges(p, smem);
#endif
    if (hc::ptx::elect_sync()) produce_boxes(p, smem);
}
