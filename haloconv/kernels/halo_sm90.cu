// halo_sm90: convolution on Hopper's tensor cores with the input staged once for all taps. One kernel serves fprop and
// dgrad: the host brings either into the form "sum over taps and channels of packed weight * shifted input".
//
// The trick: shared memory holds the input as [pixel][channels of a chunk], 32 to 128 bytes a pixel, and wgmma's
// descriptor of N = RUN neighbouring pixels may start at any pixel. So a tap is an address offset, and the halo is
// loaded once. M is filters (rows of several output pixels' filters where filters are few), K is channels.
//
// Roles: warpgroups 0 and 1 consume, LINE_WARPS warps stage input lines, the last streams weights. Two rings of shared
// memory: `slots` hold lines (a row of pixels, or FLAT a whole tile with its halo), `stages` one tap's weights. A tile
// that stands below the last one keeps the lines they share. The consumers read the same weights, the second some taps
// later: while one writes its sums, the other keeps the tensor cores busy.
//
// Budget: RUNS * RUN / 2 sums a thread; the host fits slots, stages and buffers into shared memory (see Smem).
#include "halo_sm90/stage.cuh"
#include "halo_sm90/tile.cuh"
#include "halo_sm90/write.cuh"
#include "pipeline.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/register.cuh"
#include "ptx/wgmma.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; MULTIPLY is hc::tf32, hc::fp16 or hc::bf16; all others integers.
//   RUN RUNS           pixels of one wgmma (N), and runs of a consumer
//   CONSUMERS_M        1: the consumers take different pixels, 2: different filters of the same pixels
//   FLAT               1: a line is a tile of rows with its halo, end to end; 0: a line is one row
//   CHUNK_BYTES        channels of a chunk: bytes of a staged pixel
//   X_CHANNELS_INNER   1: neighbours in memory are channels, 0: pixels
//   X_VECTOR           they come in aligned groups: 16 bytes of channels, or four pixels
//   Y_CHANNELS_INNER Y_VECTOR  the same for the output; whole groups matter for channels only
//   LINE_WARPS         3 or 7 warps stage lines: few leave the consumers registers for RUN = 256
//   PACKS              1: rows of M stand for several outputs of fewer filters
//   HAS_BIAS           adds bias[filter]
using hc::Cursor;
using hc::i64;
using hc::Tile;
using elem_t = ELEM;
using hc::ptx::u64;
using Params = hc::HaloParams<elem_t>;

constexpr int CONSUMERS = 2, WARPGROUP = 128, CONSUMER_WARPS = CONSUMERS * WARPGROUP / 32;
constexpr int THREADS = 32 * (CONSUMER_WARPS + LINE_WARPS + 1);
constexpr int BLOCK_M = 64 * CONSUMERS_M;                                     // filters of a block
constexpr int CONSUMERS_N = CONSUMERS / CONSUMERS_M;                          // consumers with pixels of their own
constexpr int TILE_ROWS = FLAT ? 1 : CONSUMERS_N * RUNS;                      // rows of a tile that are lines apart
constexpr int CHUNK_ELEMS = CHUNK_BYTES / sizeof(elem_t);                     // channels of a chunk
constexpr int STAGE_BYTES = BLOCK_M * CHUNK_BYTES;                            // weights of one tap
constexpr bool COPIES = X_CHANNELS_INNER && X_VECTOR && sizeof(elem_t) == 2;  // staged without waiting registers
constexpr int MAX_SLOTS = 32, MAX_STAGES = 32, MAX_TAPS = 64;                 // of a ring; along one axis
constexpr bool LOADS_DEEP = !COPIES && (X_VECTOR || !X_CHANNELS_INNER);       // 32 registers of loads are under way
constexpr int PRODUCER_REGISTERS = LINE_WARPS == 3 && LOADS_DEEP ? 88 : 72;
constexpr int CONSUMER_REGISTERS = LINE_WARPS == 3 ? LOADS_DEEP ? 208 : 216 : 184;  // what is left
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;                           // a launch owns these, and no more
using Buffer = hc::WarpBuffer<elem_t, Y_CHANNELS_INNER>;

static_assert(LINE_WARPS == 3 || LINE_WARPS == 7, "producers are whole warpgroups");
static_assert(RUN * RUNS <= 256, "a thread's sums leave it room for the rest");
static_assert(CHUNK_BYTES == 32 || CHUNK_BYTES == 64 || CHUNK_BYTES == 128, "a chunk is one of wgmma's swizzles");
static_assert(32 * (CONSUMER_REGISTERS * CONSUMER_WARPS + PRODUCER_REGISTERS * (LINE_WARPS + 1)) <=
                  LAUNCH_REGISTERS * THREADS,
              "setmaxnreg never waits for registers that do not exist");
// Barriers and tap offsets, behind the rings and the warps' buffers.
struct Control {
    u64 slot_full[MAX_SLOTS], slot_empty[MAX_SLOTS];
    u64 stage_full[MAX_STAGES], stage_empty[MAX_STAGES];
    u64 lead;                                // the first consumer is `lead` taps ahead
    int row_px[MAX_TAPS], col_px[MAX_TAPS];  // what a tap's row and column add, in pixels
};

extern __shared__ __align__(1024) char dynamic_smem[];

// Slots, stages, buffers, control: in this order, slots and stages at multiples of 1024 bytes.
struct Smem {
    char *slots, *stages, *buffers;
    Control* control;

    __device__ __forceinline__ explicit Smem(const Params& p)
        : slots(dynamic_smem),
          stages(slots + p.slots * p.slot_bytes),
          buffers(stages + p.stages * STAGE_BYTES),
          control(reinterpret_cast<Control*>(buffers + CONSUMER_WARPS * Buffer::BYTES)) {}
};

static_assert(CONSUMER_WARPS * Buffer::BYTES % 8 == 0, "barriers are aligned");

__device__ __forceinline__ void begin(const Params& p, const Smem& smem) {
    const int thread = threadIdx.x;
    Control& control = *smem.control;
    if (thread < p.slots) {
        hc::ptx::mbarrier_init(&control.slot_full[thread], (p.slot_px + 31) / 32);
        hc::ptx::mbarrier_init(&control.slot_empty[thread], CONSUMER_WARPS);
    }
    if (thread < p.stages) {
        hc::ptx::mbarrier_init(&control.stage_full[thread], 1);
        hc::ptx::mbarrier_init(&control.stage_empty[thread], CONSUMER_WARPS);
    }
    if (thread == 0) hc::ptx::mbarrier_init(&control.lead, WARPGROUP / 32);
    hc::ptx::fence_mbarrier_init();
    if (thread < p.taps_r && FLAT) {
        const int row = thread * p.dil_h;
        control.row_px[thread] = row % p.stride_h * p.planes_w * p.plane_px.value + row / p.stride_h * p.pitch.value;
    }
    if (thread < p.taps_s) {
        const int col = thread * p.dil_w;
        control.col_px[thread] = p.first_tap_px + col % p.stride_w * p.plane_px.value + col / p.stride_w;
    }
    __syncthreads();
}

// ---- Producers ----

// The lines of a share in the order in which they are staged.
struct LineCursor {
    int index, chunk, line, first_line;

    __device__ __forceinline__ LineCursor(hc::Share share) : index(share.begin), chunk(0), line(0), first_line(0) {}
    __device__ __forceinline__ void advance(const Params& p, hc::Share share) {
        if (++line < p.lines) return;
        if (++chunk == p.chunks)
            chunk = 0, ++index, first_line = hc::steps_down(p, share, index) ? p.lines - p.new_lines : 0;
        line = first_line;
    }
};

// Units that a warp has staged and not yet announced. Loaded ones are announced at once, copied ones two units later.
struct UnitsUnderWay {
    u64 *older = nullptr, *newer = nullptr;  // their lines' barriers

    // What a warp wrote, or what its copies brought, is read by wgmma: through the fence, then the barrier.
    static __device__ __forceinline__ void announce(u64* full) {
        hc::ptx::fence_proxy_async_shared();
        hc::arrive_warp(full);
    }
    __device__ __forceinline__ void add(u64* full) {
        if constexpr (COPIES) {
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
__device__ __forceinline__ void stage_unit(const Params& p, const Tile& tile, const LineCursor& at, int unit,
                                           char* slot) {
    constexpr bool QUADS = !X_CHANNELS_INNER && X_VECTOR;
    const int lane = threadIdx.x % 32, first_px = unit * 32, px = first_px + (QUADS ? lane / 4 * 4 : lane);
    const int first_channel = at.chunk * CHUNK_ELEMS, channels = p.channels - first_channel;
    const elem_t* x = p.x + ((i64)(tile.block / p.blocks) * p.channels + first_channel) * p.x_c;
    const hc::Place place = hc::staged_pixel<FLAT, TILE_ROWS>(p, tile, at.line, px);
    if constexpr (COPIES)
        hc::copy_channels<elem_t, CHUNK_BYTES>(slot, first_px, p.slot_px, x, channels, place);
    else if constexpr (X_CHANNELS_INNER)
        hc::load_channels<elem_t, CHUNK_BYTES, X_VECTOR>(slot, first_px, p.slot_px, x, channels, place);
    else if constexpr (QUADS)
        hc::load_quads<elem_t, CHUNK_BYTES>(slot, px, p.slot_px, x, p.x_c, channels, place);
    else
        hc::load_pixels<elem_t, CHUNK_BYTES>(slot, first_px, p.slot_px, x, p.x_c, channels, place);
}

__device__ __forceinline__ void produce_lines(const Params& p, const Smem& smem, int warp) {
    const hc::Share share = hc::share_of(p);
    const int units = (p.slot_px + 31) / 32;
    Cursor slot;
    int unit = warp;  // of the warp, counted from the current line on
    UnitsUnderWay under_way;
    for (LineCursor at(share); at.index < share.end; at.advance(p, share)) {
        const Tile tile = hc::tile_at(p, at.index);
        for (; unit < units; unit += LINE_WARPS) {
            u64* empty = &smem.control->slot_empty[slot.index];
            if (!__all_sync(~0u, hc::ptx::mbarrier_try_wait_parity(empty, slot.parity ^ 1))) {
                under_way.finish();  // the consumers may need these to go on
                hc::wait(empty, slot.parity ^ 1);
            }
            stage_unit(p, tile, at, unit, smem.slots + slot.index * p.slot_bytes);
            under_way.add(&smem.control->slot_full[slot.index]);
        }
        unit -= units;
        slot.advance(p.slots);
    }
    under_way.finish();
}

__device__ __forceinline__ void produce_weights(const Params& p, const Smem& smem) {
    const hc::Share share = hc::share_of(p);
    const int taps = p.chunks * p.taps_r * p.taps_s;
    Cursor stage;
    for (int index = share.begin; index < share.end; ++index) {
        const unsigned char* from = p.packed + (i64)hc::tile_at(p, index).block * taps * STAGE_BYTES;
        for (int tap = 0; tap < taps; ++tap) {
            u64* full = &smem.control->stage_full[stage.index];
            hc::wait(&smem.control->stage_empty[stage.index], stage.parity ^ 1);
            hc::ptx::mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            hc::ptx::cp_async_bulk_shared_global(smem.stages + stage.index * STAGE_BYTES, from, STAGE_BYTES, full);
            from += STAGE_BYTES;
            stage.advance(p.stages);
        }
    }
}

// ---- Consumers ----

using Sums = float[RUNS][RUN / 2];

// The lines that a consumer has in sight, counted from the tile's first one.
struct Lines {
    int first_slot = 0;
    int waited = 0, released = 0;
    Cursor next_wait, next_release;
};

__device__ __forceinline__ void wait_lines(const Params& p, Control& control, Lines& lines, int count) {
    for (; lines.waited < count; ++lines.waited, lines.next_wait.advance(p.slots))
        hc::wait(&control.slot_full[lines.next_wait.index], lines.next_wait.parity);
}

// A line counts as read only once it was there: else a slow consumer's arrivals would be taken for the next round's.
__device__ __forceinline__ void release_lines(const Params& p, Control& control, Lines& lines, int count) {
    for (; lines.released < count; ++lines.released, lines.next_release.advance(p.slots)) {
        wait_lines(p, control, lines, lines.released + 1);
        hc::arrive_warp(&control.slot_empty[lines.next_release.index]);
    }
}

struct Consumer {
    int m, n;       // its filters and its pixels among the consumers'
    int taps_done;  // since the start
    Cursor stage;   // next weights
    Lines lines;
};

// The first pixel of each run in this row of taps, in descriptor units of 16 bytes.
__device__ __forceinline__ void locate_runs(const Params& p, const Smem& smem, const Consumer& self, int r,
                                            int (&run)[RUNS]) {
#pragma unroll
    for (int j = 0; j < RUNS; ++j) {
        const int row = self.n * RUNS + j;
        const int slot = FLAT ? self.lines.first_slot : (self.lines.first_slot + row * p.stride_h + r) % p.slots;
        const int px = FLAT ? row * RUN + smem.control->row_px[r] : 0;
        run[j] = (slot * p.slot_bytes + px * CHUNK_BYTES) / 16;
    }
}

// All taps of one chunk of channels. `kept` lines of the tile stay for the next one.
__device__ __forceinline__ void multiply_chunk(const Params& p, const Smem& smem, Consumer& self, Sums& sums,
                                               bool accumulate, int kept) {
    Control& control = *smem.control;
    const int first_row = self.n * RUNS * p.stride_h, last_row = first_row + (RUNS - 1) * p.stride_h;
    const u64 weights = hc::ptx::smem_descriptor(hc::ptx::shared_address(smem.stages) + self.m * 64 * CHUNK_BYTES, 16,
                                                 8 * CHUNK_BYTES, CHUNK_BYTES);
    const u64 pixels = hc::ptx::smem_descriptor(hc::ptx::shared_address(smem.slots), 16, 8 * CHUNK_BYTES, CHUNK_BYTES);
    int last_stage = -1;
    for (int r = 0; r < p.taps_r; ++r) {
        wait_lines(p, control, self.lines, FLAT ? 1 : last_row + r + 1);
        int run[RUNS];
        locate_runs(p, smem, self, r, run);
        for (int s = 0; s < p.taps_s; ++s) {
            const int tap_px = control.col_px[s];
            hc::wait(&control.stage_full[self.stage.index], self.stage.parity);
            hc::ptx::wgmma_fence();
            const u64 a = weights + self.stage.index * (STAGE_BYTES / 16);
#pragma unroll
            for (int k = 0; k < CHUNK_BYTES / 32; ++k)
#pragma unroll
                for (int j = 0; j < RUNS; ++j)
                    hc::ptx::wgmma_ss<MULTIPLY, RUN>(
                        sums[j], a + 2 * k, pixels + run[j] + tap_px * (CHUNK_BYTES / 16) + 2 * k, accumulate || k > 0);
            hc::ptx::wgmma_commit_group();
            hc::ptx::wgmma_wait_group<1>();  // the tap before this one is done
            if (last_stage >= 0) hc::arrive_warp(&control.stage_empty[last_stage]);
            if (!FLAT && s == 0) release_lines(p, control, self.lines, min(first_row + r, p.lines - kept));
            if (self.n + self.m == 0 && ++self.taps_done == p.lead) hc::arrive_warp(&control.lead);
            accumulate = true;
            last_stage = self.stage.index;
            self.stage.advance(p.stages);
        }
    }
    hc::ptx::wgmma_wait_group<0>();
    hc::arrive_warp(&control.stage_empty[last_stage]);
    release_lines(p, control, self.lines, p.lines - kept);
    self.lines.first_slot = (self.lines.first_slot + p.lines - kept) % p.slots;
    self.lines.waited -= p.lines - kept, self.lines.released = 0;
}

// Writes the consumer's sums of one tile.
__device__ __forceinline__ void write_tile(const Params& p, const Smem& smem, const Consumer& self, const Tile& tile,
                                           const Sums& sums) {
    const int own_row = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
    const int group = tile.block / p.blocks, m = self.m * 64 + warp % 4 * hc::WARP_ROWS;
    const int phase = PACKS ? m / p.pack_filters : 0;
    const int filter = PACKS ? m % p.pack_filters : tile.block % p.blocks * BLOCK_M + m;
    if (filter >= p.filters || phase >= p.pack_h * p.pack_w) return;
    const i64 first = (i64)group * p.filters + filter;
    hc::Rows<elem_t> rows{p.y + first * p.y_k, p.y_k, min(hc::WARP_ROWS, p.filters - filter), {0, 0}};
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (HAS_BIAS && own_row + 8 * half < rows.count)
            rows.bias[half] = hc::to_acc(p.bias[first + own_row + 8 * half]);

    elem_t* buffer = reinterpret_cast<elem_t*>(smem.buffers + warp * Buffer::BYTES);
#pragma unroll
    for (int j = 0; j < RUNS; ++j)
#pragma unroll
        for (int first_px = 0; first_px < RUN; first_px += Buffer::PIXELS) {
            constexpr int PER_LANE = Y_CHANNELS_INNER ? 1 : Buffer::PIXELS / 16;
            int row = self.n * RUNS + j, lane = threadIdx.x % 32;
            hc::ptx::renew(row), hc::ptx::renew(lane);  // one round's addresses at a time: registers are full of sums
            hc::Place places[PER_LANE];
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                places[i] = hc::written_pixel<FLAT, TILE_ROWS>(
                    p, tile, row,
                    (FLAT ? row * RUN : 0) + first_px + (Y_CHANNELS_INNER ? lane : lane % 16 * PER_LANE + i), phase);
            hc::fill<elem_t, Y_CHANNELS_INNER>(buffer, lane, sums[j], first_px / 8, rows);
            __syncwarp();
            if constexpr (Y_CHANNELS_INNER)
                hc::write_by_rows<elem_t, Y_VECTOR>(buffer, lane, places[0], rows);
            else
                hc::write_by_pixels<elem_t>(buffer, lane, places, rows);
            __syncwarp();
        }
}

// Outputs of a pack meet pixels that are not theirs with weight zero: tells halo_sm90_repair.cu where that may matter.
__device__ __forceinline__ void note_not_finite(const Params& p, const Sums& sums) {
    float mark = 0;  // becomes NaN if a sum is not finite
#pragma unroll
    for (int i = 0; i < RUNS * RUN / 2; ++i) mark += sums[i / (RUN / 2)][i % (RUN / 2)] * 0.f;
    if (mark != 0.f) atomicExch(p.not_finite, 1u);
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int consumer) {
    const hc::Share share = hc::share_of(p);
    Consumer self{CONSUMERS_M == 2 ? consumer : 0, CONSUMERS_M == 2 ? 0 : consumer, 0, {}, {}};
    if (consumer == 1 && p.lead > 0 && share.begin < share.end) hc::wait(&smem.control->lead, 0);
    for (int index = share.begin; index < share.end; ++index) {
        Sums sums;
        const int kept = hc::steps_down(p, share, index + 1) ? p.lines - p.new_lines : 0;
        for (int chunk = 0; chunk < p.chunks; ++chunk) multiply_chunk(p, smem, self, sums, chunk > 0, kept);
        if (PACKS) note_not_finite(p, sums);
        write_tile(p, smem, self, hc::tile_at(p, index), sums);
    }
}

// ---- The kernel ----

extern "C" __global__ void __launch_bounds__(THREADS, 1) halo_sm90(const __grid_constant__ Params p) {
    const Smem smem(p);
    begin(p, smem);
    const int warp = threadIdx.x / 32;
    if (warp < CONSUMER_WARPS) {
        hc::ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(p, smem, warp / 4);
    } else {
        hc::ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp < CONSUMER_WARPS + LINE_WARPS)
            produce_lines(p, smem, warp - CONSUMER_WARPS);
        else if (threadIdx.x % 32 == 0)
            produce_weights(p, smem);
    }
}
