// The end of a tile in halo_sm90: from a consumer's sums to the output, through halo_sm90/write.cuh.
#pragma once

#include "families/halo_sm90/conv/classes.cuh"
#include "families/halo_sm90/conv/shape.cuh"
#include "kernels/ceil_div.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/register.cuh"
#include "kernels/ptx/tensor_map.cuh"

using Sums = float[RUNS][RUN / 2];

struct Consumer {
    int id;
    Cursor stage;  // next weights in its ring of stages
    char* stages;
    u64 *stage_full, *stage_empty;
    char* buffer;        // of the warp (by pixels) or of its consumer (by filters)
    Cursor next_buffer;  // of BUFFERS
    int barrier;         // of the consumer's warps
};

// The filters that the rows of M from `row` on stand for: their group, the first, how many are left, and the output of
// the output pack, or the (first) residue class, that the rows compute. Neighbouring rows are Y_PLANES filters apart:
// the first blocks have filters 0, Y_PLANES, 2 Y_PLANES, ..., the next ones 1, 1 + Y_PLANES, ..., and so forth. So the
// planes of all filters of a block begin equally far behind a 16-byte boundary.
struct Filters {
    int group, first, count, residue;
};

__device__ __forceinline__ Filters filters_of(const Params& p, int consumer, const WorkTile& column, int row) {
    const int block = column.block * STREAMS + (SHARED_TILE ? consumer : 0);
    if constexpr (CLASSES) {
        const hc::ClassRows own = hc::class_rows_at<ACROSS>(p, block * BLOCK_M + row);
        return {column.group, own.first, own.count, own.residue};
    }
    if constexpr (Y_PLANES == 1) {
        const int first = block * PACK_FILTERS + row % PACK_FILTERS;
        return {column.group, first, p.filters - first, row / PACK_FILTERS};
    }
    const int filters = p.filters / Y_PLANES, blocks = hc::ceil_div(filters, BLOCK_M);
    int plane = 0;  // of the first filter
#pragma unroll
    for (int next = 1; next < Y_PLANES; ++next) plane += block >= next * blocks;
    const int own = (block - plane * blocks) * BLOCK_M + row;
    return {column.group, own * Y_PLANES + plane, filters - own, 0};
}

// Row of the output that pixel run `run` of a tile column is (ROWS), for output `residue` of an output pack.
__device__ __forceinline__ int box_row(const Params& p, const WorkTile& column, int run, int residue) {
    return column.cls + p.schedule.classes.value * (run * p.pack_h + residue);
}

// Elements from the last plane that begins at a multiple of 16 bytes to row `out_row` of filter `filter`.
__device__ __forceinline__ int row_begin(const Params& p, int filter, int out_row) {
    return out_row * int(p.y_row) + int(unsigned(filter) % Y_PLANES) * int(p.y_k);
}

// Elements from the last 16-byte boundary to the begin of that row (0 unless Y_JOINED). The tile begins so much before
// its strip, so that each box that TMA stores begins at a multiple of 16 bytes.
__device__ __forceinline__ int row_shift(const Params& p, int filter, int out_row) {
    return Y_JOINED ? row_begin(p, filter, out_row) & (16 / int(sizeof(y_elem_t)) - 1) : 0;
}

// Large tiles that lanes store loop over their buffers. Only the fill is unrolled, because registers have no index.
// Unrolled as a whole, they compile twice as long, or spill; rolled, tiles that TMA stores are up to 13 % slower.
constexpr bool ROLLED = !Y_BOXES && TILE_PX > (hc::IsLong<ACTIVATION>::VALUE || RESIDUAL ? 64 : 128);

// Every warp writes its rows of a tile, a buffer at a time. Registers are full of sums, so it computes the addresses of
// each when it comes to it (renew).
template <class Finished>
__device__ __forceinline__ void write_by_pixels(const Params& p, Consumer& self, WorkTile column,
                                                const Filters& filters, int tile, const Sums& sums,
                                                const Finished& finish) {
    constexpr int PX = PixelBuffer::PIXELS;
    if (ROLLED) hc::ptx::renew(column.strip), hc::ptx::renew(column.image), hc::ptx::renew(column.cls);
#pragma unroll(ROLLED ? 1 : TILE_PX / PX)
    for (int px = 0; px < TILE_PX; px += PX) {
        int run = tile * RUNS + px / RUN, lane = threadIdx.x % 32;
        if (!Y_BOXES) hc::ptx::renew(run);
        hc::ptx::renew(lane);
        const int first_px = px % RUN, out_row = box_row(p, column, run, filters.residue);
        const int shift = row_shift(p, filters.first, out_row), col = column.strip * p.strip_cols - shift + first_px;
        const bool sends =  // no pixels of other rows or planes
            Y_BOXES && (!Y_JOINED || (col >= 0 && col + PX <= p.cols && (Y_PLANES == 1 || out_row < p.rows)));
        char* buffer = self.buffer + self.next_buffer.index * PixelBuffer::BYTES;
        if (Y_BOXES && hc::ptx::elect_sync()) hc::ptx::cp_async_bulk_wait_group_read<BUFFERS - 1>();
        self.next_buffer.advance(BUFFERS);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < TILE_PX; i += PX)
            if (i == px) hc::fill_by_pixels<y_elem_t>(buffer, sums[i / RUN], i % RUN / 8, finish);
        if (Y_BOXES || Y_IN_STAGE) hc::ptx::fence_proxy_async_shared();
        __syncwarp();
        if (Y_BOXES && hc::ptx::elect_sync()) {
            if (sends)
                hc::ptx::cp_async_bulk_tensor_5d_global_shared(
                    &p.y_map, buffer, Y_JOINED ? row_begin(p, filters.first, out_row) + col : col,
                    Y_JOINED ? 0 : out_row, unsigned(filters.first) / Y_PLANES, filters.group, column.image);
            hc::ptx::cp_async_bulk_commit_group();
        }
        const hc::Rows<y_elem_t> rows{p.y + ((i64)filters.group * p.filters + filters.first) * p.y_k, Y_PLANES * p.y_k,
                                      min(hc::WARP_ROWS, filters.count)};
        if constexpr (Y_JOINED) {
            if (!sends && out_row < p.rows)
                hc::store_part<y_elem_t>(buffer, lane, -col, p.cols - col,
                                         rows.y + hc::place_of(p, {column.image, out_row, col}).offset, rows);
        } else if constexpr (!Y_BOXES) {
            const auto place_of = [&](int i) {
                return hc::place_of(
                    p, hc::output_of<FLAT>(p, column, run, (FLAT ? run * RUN : 0) + first_px + i, filters.residue));
            };
            if constexpr (Y_NEIGHBOURS) {  // of which the first ones are inside
                const hc::Output at = hc::output_of<FLAT>(p, column, run, first_px, filters.residue);
                const int count = at.inside ? min(PX, p.cols - at.col) : 0;
                y_elem_t* to = rows.y + hc::place_of(p, at).offset;
                if (count > 0 && !hc::store_row<8>(buffer, lane, count, to, rows) &&
                    !hc::store_row<4>(buffer, lane, count, to, rows))
                    hc::store_elements<y_elem_t>(buffer, lane, place_of, rows);
            } else {
                hc::store_by_pixels<y_elem_t>(buffer, lane, place_of, rows);
            }
        }
    }
}

// Writes a warp's rows of a tile where they are those of ACROSS column residue classes: a buffer has pieces of rows of
// dx.
template <class Finished>
__device__ __forceinline__ void write_across(const Params& p, Consumer& self, WorkTile column, const Filters& filters,
                                             int tile, const Sums& sums, const Finished& finish) {
    constexpr int PX = PixelBuffer::PIXELS, PIECE_PX = 8 / sizeof(y_elem_t);
    constexpr bool PIECES = FLAT && ACROSS >= 8;  // in pieces of fewer classes it takes longer than by elements
    if (ROLLED) hc::ptx::renew(column.strip), hc::ptx::renew(column.image), hc::ptx::renew(column.cls);
    const bool aligned = (PIECES || !FLAT) && (((unsigned)p.y_n | (unsigned)p.y_k | (unsigned)p.y_row) % PIECE_PX == 0);
#pragma unroll(ROLLED ? 1 : TILE_PX / PX)
    for (int px = 0; px < TILE_PX; px += PX) {
        int run = tile * RUNS + px / RUN, lane = threadIdx.x % 32;
        hc::ptx::renew(run), hc::ptx::renew(lane);
        const int first_px = (FLAT ? run * RUN : 0) + px % RUN;
        const hc::Output at = hc::output_of<FLAT>(p, column, run, first_px, filters.residue);
        const int shift = aligned ? at.col & PIECE_PX - 1 : 0;
        char* buffer = self.buffer;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < TILE_PX; i += PX)
            if (px == i) hc::fill_across<y_elem_t, ACROSS>(buffer, lane, sums[i / RUN], i % RUN / 8, shift, finish);
        if (Y_IN_STAGE) hc::ptx::fence_proxy_async_shared();
        __syncwarp();
        hc::Rows<y_elem_t> rows{p.y + ((i64)filters.group * p.filters + filters.first) * p.y_k, p.y_k,
                                min(hc::WARP_ROWS / ACROSS, filters.count)};
        const auto place_of = [&](int i, int residue) {
            return hc::place_of(p, hc::output_of<FLAT>(p, column, run, first_px + i, filters.residue + residue));
        };
        if (!aligned) {
            hc::store_line_elements<y_elem_t, ACROSS>(buffer, lane, place_of, rows);
        } else if constexpr (PIECES) {
            hc::store_line_pieces<y_elem_t, ACROSS, PIECE_PX>(buffer, lane, shift, place_of, rows);
        } else {
            rows.y += at.n * p.y_n + at.row * p.y_row;
            if ((unsigned)at.row < (unsigned)p.rows)
                hc::store_lines<y_elem_t, ACROSS>(buffer, lane, at.col, shift, p.cols, rows);
        }
    }
}

// Sends part `part` of a consumer's buffer, whose first pixel is `first_px` of pixel run `run`. `filters` are the
// block's, or of classes the part's.
__device__ __forceinline__ void send_part(const Params& p, const char* buffer, const WorkTile& column,
                                          const Filters& filters, int run, int first_px, int part) {
    constexpr int PART_FILTERS = FILTER_ROW_BYTES / sizeof(y_elem_t);
    static_assert(PACKS == 1 || PART_FILTERS == PACK_FILTERS, "a part is one output of a pack");
    if constexpr (CLASSES) {
        const int row = hc::class_row(p, column, run, filters.residue);
        if (row >= 0)  // a negative coordinate of a store is an illegal instruction
            hc::ptx::cp_async_bulk_tensor_5d_global_shared(&p.y_map, buffer + part * FilterBuffer::PART_BYTES,
                                                           filters.first, filters.residue % p.pack_w,
                                                           column.strip * p.strip_cols + first_px, row, column.image);
        return;
    }
    hc::ptx::cp_async_bulk_tensor_5d_global_shared(&p.y_map, buffer + part * FilterBuffer::PART_BYTES,
                                                   filters.first + (PACKS == 1 ? part * PART_FILTERS : 0),
                                                   filters.group, column.strip * p.strip_cols + first_px,
                                                   box_row(p, column, run, PACKS == 1 ? 0 : part), column.image);
}

// The warps of a consumer write its rows of one pixel run together.
template <class Finished>
__device__ __forceinline__ void write_by_filters(const Params& p, Control& control, Consumer& self,
                                                 const WorkTile& column, const Filters& filters, int run,
                                                 const float (&sums)[RUN / 2], const Finished& finish) {
    constexpr int PX = FilterBuffer::PIXELS;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32;
#pragma unroll
    for (int first_px = 0; first_px < RUN; first_px += PX) {
        int row = run, lane = thread % 32;
        hc::ptx::renew(row), hc::ptx::renew(lane);
        const Cursor at = self.next_buffer;
        self.next_buffer.advance(BUFFERS);
        char* buffer = self.buffer + at.index * FilterBuffer::BYTES;
        if (SENDERS) hc::wait(&control.sums_empty[self.id][at.index], at.parity ^ 1);
        hc::fill_by_filters<y_elem_t, FILTER_ROW_BYTES>(buffer, warp, sums, first_px / 8, finish);
        if constexpr (SENDERS) {
            hc::ptx::fence_proxy_async_shared();
            hc::arrive_warp(&control.sums_full[self.id][at.index]);
        } else if constexpr (Y_BOXES) {  // a box takes its thread 150 cycles: each part has a warp of its own
            const bool sends = warp < FilterBuffer::PARTS && hc::ptx::elect_sync();
            hc::ptx::fence_proxy_async_shared();
            if (sends) hc::ptx::cp_async_bulk_wait_group_read<BUFFERS - 2>();  // the next buffer is free
            hc::ptx::bar_sync(self.barrier, WARPGROUP);
            if (sends) {
                send_part(p, buffer, column, CLASSES ? filters_of(p, self.id, column, warp * PACK_FILTERS) : filters,
                          run, first_px, warp);
                hc::ptx::cp_async_bulk_commit_group();
            }
        } else {
            hc::ptx::bar_sync(self.barrier, WARPGROUP);
#pragma unroll
            for (int px = 0; px < PX; px += 32) {
                if constexpr (CLASSES) {
                    i64 offsets[PACKS];
                    int counts[PACKS];
#pragma unroll
                    for (int part = 0; part < PACKS; ++part) {
                        const Filters own = filters_of(p, self.id, column, part * PACK_FILTERS);
                        const hc::Output at = hc::output_of<FLAT>(
                            p, column, row, first_px + px + lane + (FLAT ? row * RUN : 0), own.residue);
                        offsets[part] = hc::place_of(p, at).offset + ((i64)own.group * p.filters + own.first) * p.y_k;
                        counts[part] = at.inside ? own.count : 0;
                    }
                    hc::store_by_class<y_elem_t, FILTER_ROW_BYTES, Y_VECTOR>(buffer, warp, px, offsets, counts, p.y);
                    continue;
                }
                hc::Place places[PACKS];
#pragma unroll
                for (int output = 0; output < PACKS; ++output)
                    places[output] = hc::place_of(
                        p, hc::output_of<FLAT>(p, column, row, (FLAT ? row * RUN : 0) + first_px + px + lane, output));
                hc::store_by_filters<y_elem_t, FILTER_ROW_BYTES, Y_VECTOR>(
                    buffer, warp, px, places, p.y + ((i64)filters.group * p.filters + filters.first) * p.y_k,
                    filters.count);
            }
        }
    }
}

// The stage of the tap before, in the consumer's own ring.
__device__ __forceinline__ int last_stage(const Params& p, const Consumer& self) {
    return (self.stage.index > 0 ? self.stage.index : STAGES) - 1;
}

// Makes the stage of a tile's last tap the warps' buffers (Y_IN_STAGE). Each gets the part that held the weights of its
// own rows of M, which no other warp reads.
__device__ __forceinline__ void keep_stage(const Params& p, Consumer& self) {
    self.buffer = self.stages + last_stage(p, self) * STAGE_BYTES + threadIdx.x % WARPGROUP / 32 * PixelBuffer::BYTES;
}

// Gives the stage of a tile's last tap back to the weights, once the warp's sums have left it.
__device__ __forceinline__ void give_back_stage(const Params& p, Consumer& self) {
    if (hc::ptx::elect_sync()) hc::ptx::cp_async_bulk_wait_group_read<0>();
    hc::arrive_warp(&self.stage_empty[last_stage(p, self)]);
}

// Adds the residual to the sums of a tile, after bias and scale, while they are in registers. Its address may be any,
// so a lane loads one element for each output. Registers are full of sums: the loads of eight pixels are in flight at a
// time, the loop is not unrolled, and each iteration computes its addresses anew (renew).
template <class P>
__device__ __forceinline__ void add_residual(const P& p, int consumer, const WorkTile& of, int tile, Sums& sums) {
    constexpr int PX = 8;
#pragma unroll 1
    for (int px = 0; px < TILE_PX; px += PX) {
        int run = tile * RUNS + px / RUN, thread = threadIdx.x % WARPGROUP;
        WorkTile column = of;
        hc::ptx::renew(run), hc::ptx::renew(thread);
        hc::ptx::renew(column.strip), hc::ptx::renew(column.image), hc::ptx::renew(column.cls);
        const int lane = thread % 32, row = SPREAD ? hc::spread_row(lane / 4) : lane / 4;
        const Filters own = filters_of(p, consumer, column, thread / 32 * hc::WARP_ROWS);
        const int shift = row_shift(p, own.first, box_row(p, column, run, own.residue));
        const int first = (FLAT ? run * RUN : 0) + px % RUN - shift + lane % 4 * 2;
        const i64 filter = (i64)own.group * p.filters + own.first + Y_PLANES * row;
        float values[PX / 2];
#pragma unroll
        for (int i = 0; i < PX / 4; ++i) {
            int at_px = first + i / 2 * 8 + i % 2;
            hc::ptx::renew(at_px);
            const hc::Output at = hc::output_of<FLAT>(p, column, run, at_px, own.residue);
            const bool inside =
                at.n < p.n && (unsigned)at.row < (unsigned)p.rows && (unsigned)at.col < (unsigned)p.cols;
            const elem_t* const element = p.residual + filter * p.y_k + hc::place_of(p, at).offset;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                values[i / 2 * 4 + 2 * half + i % 2] =
                    inside && row + 8 * half < own.count ? hc::to_acc(element[8 * half * Y_PLANES * p.y_k]) : 0.f;
        }
        hc::BiasAndScale both[2] = {};
#pragma unroll
        for (int half = 0; AFFINE != hc::Affine::NONE && half < 2; ++half)
            if (row + 8 * half < own.count) both[half] = hc::bias_and_scale(p.bias[filter + 8 * half * Y_PLANES]);
#pragma unroll
        for (int to = 0; to < TILE_PX; to += PX)
#pragma unroll
            for (int i = 0; i < PX / 2; ++i) {
                float& sum = sums[to / RUN][to % RUN / 2 + i];
                if (to == px) sum = hc::finished<AFFINE, hc::Activation::NONE>(sum, both[i / 2 % 2]) + values[i];
            }
    }
}

// Writes the sums of tile `tile` of a tile column.
__device__ __forceinline__ void write_tile(const Params& p, Control& control, Consumer& self, const WorkTile& column,
                                           int tile, Sums& sums) {
    const int warp_row = threadIdx.x % WARPGROUP / 32 * hc::WARP_ROWS;
    const Filters own = filters_of(p, self.id, column, warp_row);
    hc::Finish<RESIDUAL ? hc::Affine::NONE : AFFINE, ACTIVATION> finish{};
#pragma unroll
    for (int half = 0; !RESIDUAL && AFFINE != hc::Affine::NONE && half < 2; ++half) {
        const int own_row = threadIdx.x % 32 / 4;
        const int row = ACROSS > 1 ? own_row / (ACROSS / 2) : (SPREAD ? hc::spread_row(own_row) : own_row) + 8 * half;
        if (row < own.count)
            finish.own[half] = hc::bias_and_scale(p.bias[(i64)own.group * p.filters + own.first + Y_PLANES * row]);
    }
    if constexpr (RESIDUAL) add_residual(p, self.id, column, tile, sums);
    if constexpr (Y_CHANNELS_INNER) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run)
            write_by_filters(p, control, self, column, filters_of(p, self.id, column, 0), tile * RUNS + run, sums[run],
                             finish);
    } else if (own.count > 0) {
        if constexpr (ACROSS > 1)
            write_across(p, self, column, own, tile, sums, finish);
        else
            write_by_pixels(p, self, column, own, tile, sums, finish);
    }
}

// Sends all tiles of a consumer, buffer by buffer (SENDERS). A buffer is sent once TMA has read the one before.
__device__ __forceinline__ void send_tiles(const Params& p, const Smem& smem, int consumer) {
    const char* buffers = smem.buffers + consumer * (CONSUMER_WARPS / CONSUMERS) * WARP_BUFFER_BYTES;
    u64 *full = smem.control->sums_full[consumer], *empty = smem.control->sums_empty[consumer];
    Cursor at, before;
    bool has_before = false;
    for (hc::Segments segment(p.schedule); segment.next(p.schedule);) {
        const Filters filters = filters_of(p, consumer, segment.first, 0);
        const int first_run = hc::TILES * segment.first.index * RUNS;
        for (int own = SHARED_TILE ? 0 : consumer; own < hc::TILES * segment.work_tiles; own += hc::TILES)
            for (int px = 0; px < TILE_PX; px += FilterBuffer::PIXELS) {
                hc::wait(&full[at.index], at.parity);
                hc::ptx::cp_async_bulk_wait_group_read<0>();
                if (has_before) hc::ptx::mbarrier_arrive(&empty[before.index]);
                for (int part = 0; part < FilterBuffer::PARTS; ++part)
                    send_part(p, buffers + at.index * FilterBuffer::BYTES, segment.first,
                              CLASSES ? filters_of(p, consumer, segment.first, part * PACK_FILTERS) : filters,
                              first_run + own * RUNS + px / RUN, px % RUN, part);
                hc::ptx::cp_async_bulk_commit_group();
                before = at, has_before = true;
                at.advance(BUFFERS);
            }
    }
    hc::ptx::cp_async_bulk_wait_group_read<0>();  // and these buffers their last box
}

// Tells fixup.cu that there may be nonfinite outputs.
__device__ __forceinline__ void note_not_finite(const Params& p, const Sums& sums) {
    float mark = 0;  // becomes NaN if a sum is not finite
#pragma unroll
    for (int i = 0; i < RUNS * RUN / 2; ++i) mark += sums[i / (RUN / 2)][i % (RUN / 2)] * 0.f;
    if (mark != 0.f) atomicExch(p.not_finite, 1u);
}
