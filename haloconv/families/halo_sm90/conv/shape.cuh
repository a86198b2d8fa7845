// The shape of halo_sm90 under its constants: roles, registers, shared memory, and which line is in which slot.
#pragma once

#include "families/halo_sm90/conv/stage.cuh"
#include "families/halo_sm90/conv/tile.cuh"
#include "families/halo_sm90/conv/transpose.cuh"
#include "families/halo_sm90/conv/write.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/fence.cuh"

using hc::Cursor;
using hc::i64;
using hc::WorkTile;
using elem_t = ELEM;
using y_elem_t = Y_ELEM;
using hc::ptx::u64;
using bias_t = hc::BiasOf<y_elem_t, AFFINE>::type;
using Params = hc::HaloParams<elem_t, y_elem_t, bias_t>;

constexpr int CONSUMERS = 2, WARPGROUP = 128, CONSUMER_WARPS = CONSUMERS * WARPGROUP / 32;
constexpr int BLOCK_M = 64, PACK_FILTERS = BLOCK_M / PACKS;  // filters of a block, of an output of an output pack
constexpr int TILE_PX = RUN * RUNS;                          // pixels of a tile
constexpr int CHUNK_ELEMS = CHUNK_BYTES / sizeof(elem_t);    // channels of a chunk
constexpr int TERMS = OPERAND_TERMS;                         // of a value
// TERMS > 1: taps of a row whose products are summed before the tile's sums take them (docs/precision.md).
constexpr int PART_TAPS = CHUNK_BYTES == 128 ? 2 : CHUNK_BYTES == 64 ? 3 : 4;
constexpr int TERM_BYTES = BLOCK_M * CHUNK_BYTES;              // one term of the weights of one tap
constexpr int STAGE_BYTES = TERMS * TERM_BYTES;                // weights of one tap
constexpr int STREAMS = SHARED_TILE ? CONSUMERS : 1;           // of weights, each with a ring of stages
constexpr int MAX_SLOTS = 32, MAX_STAGES = 32, MAX_TAPS = 64;  // of a ring; along one axis

constexpr bool BOXED = X_BOXES && X_CHANNELS_INNER, TRANSPOSED = X_BOXES && !X_CHANNELS_INNER;
enum { BOXED_EDGES = BOXED && hc::COL_EDGE != hc::Edge::ZEROS, BOXES_AHEAD = 2 };  // lines of boxes under way there
constexpr bool COPIED = !X_BOXES && X_CHANNELS_INNER && X_VECTOR && sizeof(elem_t) == 2;  // no registers wait for them
constexpr int RAW_BYTES = hc::UNIT_PX * CHUNK_BYTES, RAW_TILES = LINE_WARPS * RAW_DEPTH;
constexpr int SPARE_BYTES =
    TRANSPOSED && sizeof(elem_t) == 2 ? 512 : 0;     // of a warp, for pixels that are not the row's
constexpr int PLANES = X_JOINED > 1 ? X_JOINED : 1;  // of channels that boxes take as one long row
enum { Y_PLANES = Y_JOINED > 1 ? Y_JOINED : 1 };     // a block's filters are so far apart
constexpr int PRODUCER_WARPS = LINE_WARPS + 1, THREADS = 32 * (CONSUMER_WARPS + PRODUCER_WARPS);
constexpr bool TWO_PRODUCER_WARPGROUPS = PRODUCER_WARPS == 8;

// Registers of a thread. Producers get what they need, more where they load or transpose, and consumers what is left of
// 65536; their sums, with several terms also partial sums, take SUM_REGISTERS.
enum { SUM_REGISTERS = RUN * RUNS / 2 * (TERMS > 1 ? 2 : 1) };
constexpr bool SUMS_OVER_64 = SUM_REGISTERS > 64;
constexpr int PRODUCER_REGISTERS = TWO_PRODUCER_WARPGROUPS ? 104 : BOXED ? 56 : SUMS_OVER_64 ? 88 : 152;
constexpr int CONSUMER_REGISTERS = TWO_PRODUCER_WARPGROUPS ? 152 : BOXED ? 224 : SUMS_OVER_64 ? 208 : 168;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;  // a launch owns these, and no more

enum { ACROSS = Y_NEIGHBOURS > 1 ? Y_NEIGHBOURS : 1 };  // residues of columns whose pixels alternate in a row of dx
constexpr bool SPREAD = sizeof(y_elem_t) == 4 && ACROSS == 1 && !Y_CHANNELS_INNER;  // which filter a row of M is

using PixelBuffer = hc::PixelBuffer<y_elem_t>;
constexpr int FILTER_ROW_BYTES = PACK_FILTERS * sizeof(y_elem_t) < 128 ? PACK_FILTERS * sizeof(y_elem_t) : 128;
using FilterBuffer = hc::FilterBuffer<y_elem_t, FILTER_ROW_BYTES>;
constexpr int BUFFERS = Y_BUFFERS;  // of a consumer by filters, of a warp by pixels
// A consumer with a stream of its own keeps the stage of a tile's last tap until its sums have left through it.
constexpr bool Y_IN_STAGE = SHARED_TILE && !Y_CHANNELS_INNER && TERMS == 1 && STAGE_BYTES == 4 * PixelBuffer::BYTES;
constexpr int WARP_BUFFER_BYTES =
    Y_IN_STAGE ? 0 : BUFFERS * (Y_CHANNELS_INNER ? FilterBuffer::BYTES / 4 : PixelBuffer::BYTES);

// Sums that an infinity or a NaN has met may be NaN where the output is none: outputs of an output pack are multiplied
// by zeros of others, and those of residue classes that have fewer taps; and an infinity has more than one term. The
// nonfinite fix-up (fixup.cu) sums them once more.
constexpr bool NEEDS_FIXUP = CLASSES || PACKS > 1 || TERMS > 1;

// Where channels are neighbours on both sides TMA does all that line warps do elsewhere, and two of them are free: each
// sends a consumer's boxes, so that none of its warps waits for the other three or for a box.
constexpr bool SENDERS = BOXED && Y_BOXES && Y_CHANNELS_INNER;

static_assert(SUM_REGISTERS <= 128, "a thread's sums leave it room for the rest");
static_assert(CHUNK_BYTES == 32 || CHUNK_BYTES == 64 || CHUNK_BYTES == 128, "a chunk is one of wgmma's swizzles");
static_assert(TERMS == 1 || (sizeof(elem_t) == 4 && !BOXED), "fp32 is cut into terms in registers");
static_assert(PACKS == 1 || PACKS == 2 || (CLASSES && PACKS == 4), "an output of a pack has two warps' rows or one's");
static_assert((PACKS == 1 && !CLASSES) || Y_PLANES == 1, "packs and classes have blocks of filters of their own");
static_assert(TRANSPOSED ? RAW_DEPTH == 1 || RAW_DEPTH == 2 : RAW_DEPTH == 0, "raw tiles are transposed");
static_assert(CHUNK_ELEMS / PLANES >= 8 || PLANES == 1, "the boxes of a raw tile begin where its swizzle does");
static_assert(BUFFERS == 2 || (BUFFERS == 1 && !Y_CHANNELS_INNER), "by filters one is filled while one is sent");
static_assert(BUFFERS == 1 || !Y_IN_STAGE, "a stage is a buffer for each warp");
static_assert(!SENDERS || LINE_WARPS == 1 + CONSUMERS, "one warp asks for boxes of the input, the others send");
static_assert(!EDGES || !(FLAT || CLASSES || PLANES > 1 || TERMS > 1), "rows by themselves know what stands outside");
static_assert(hc::ROW_EDGE != hc::Edge::HALO || (X_BOXES && !X_JOINED && !NEEDS_FIXUP),
              "TMA brings rows of the halo, each by itself, and the fix-up has none");
static_assert(RUN % 64 == 0, "buffers of pixels are filled as a whole");
static_assert(32 * (CONSUMER_REGISTERS * CONSUMER_WARPS + PRODUCER_REGISTERS * PRODUCER_WARPS) <=
                  LAUNCH_REGISTERS * THREADS,
              "setmaxnreg never waits for registers that do not exist");

// A line's slot: position `at` of a ring that goes on over all segments. With KEEPS each chunk has a ring.
struct Slot {
    int index;
    unsigned parity;

    Slot() = default;
    __device__ __forceinline__ Slot(const Params& p, int at, int chunk) {
        const unsigned round = unsigned(at) / RING;
        index = at - round * RING + (KEEPS ? chunk * RING : 0), parity = round & 1;
    }
};

// Barriers and tap offsets, behind the rings and the warps' buffers.
struct Control {
    u64 slot_full[MAX_SLOTS], slot_empty[MAX_SLOTS];
    u64 stage_full[MAX_STAGES], stage_empty[MAX_STAGES];
    u64 raw_full[LINE_WARPS][RAW_DEPTH ? RAW_DEPTH : 1];                // BOXED_EDGES: of a line's boxes
    u64 half_way[CONSUMERS];                                            // SHARED_TILE: of a consumer's current tile
    u64 sums_full[CONSUMERS][BUFFERS], sums_empty[CONSUMERS][BUFFERS];  // SENDERS: a consumer's buffers
    int row_px[MAX_TAPS], col_px[MAX_TAPS];                             // what a tap's row and column add, in pixels
};

extern __shared__ __align__(1024) char dynamic_smem[];

// Slots, stages, raw tiles, buffers, spare bytes, control: in this order, the first four at multiples of 1024 bytes.
struct Smem {
    char *slots, *stages, *raw, *buffers, *spare;
    Control* control;

    __device__ __forceinline__ explicit Smem(const Params& p)
        : slots(dynamic_smem),
          stages(slots + (KEEPS ? p.chunks : 1) * RING * p.slot_bytes),
          raw(stages + STREAMS * STAGES * STAGE_BYTES),
          buffers(raw + RAW_TILES * RAW_BYTES),
          spare(buffers + CONSUMER_WARPS * WARP_BUFFER_BYTES),
          control(reinterpret_cast<Control*>(spare + LINE_WARPS * SPARE_BYTES)) {}
};

// Lines of the first `tiles` tiles of a segment of `work_tiles` work tiles.
__device__ __forceinline__ int lines_of_tiles(const Params& p, int tiles, int work_tiles) {
    return tiles <= 0 ? 0 : hc::lines_of<RUNS>(p, 0, min(tiles, hc::TILES * work_tiles), 0, p.taps_r).end;
}

// Lines that the producers stage for a phase of a work tile: all that it reads, or with KEEPS those that are new.
__device__ __forceinline__ hc::LineRange staged_lines(const Params& p, const hc::Phase& phase, int i, int work_tile,
                                                      int work_tiles) {
    if (FLAT) return {0, 1};
    if (!KEEPS) return hc::lines_of<RUNS>(p, phase.first_tile, phase.tiles, phase.r, phase.r_end);
    if (SHARED_TILE) return {lines_of_tiles(p, work_tile, work_tiles), lines_of_tiles(p, work_tile + 1, work_tiles)};
    const int tiles = 2 * work_tile + 1 + i, known = tiles - (p.chunks == 1 && FIRST_PHASE == 0 ? 1 : 2);
    return {lines_of_tiles(p, known, work_tiles), lines_of_tiles(p, tiles, work_tiles)};
}

// Units of 32 pixels that warps stage for a line; where they are transposed, its barrier counts warps.
__device__ __forceinline__ int units_of_line(const Params& p) {
    return TRANSPOSED ? p.boxes * p.box_units.value : (p.slot_px + hc::UNIT_PX - 1) / hc::UNIT_PX;
}

__device__ __forceinline__ void begin(const Params& p, const Smem& smem) {
    const int thread = threadIdx.x;
    Control& control = *smem.control;
    if (thread < (KEEPS ? p.chunks : 1) * RING) {
        hc::ptx::mbarrier_init(&control.slot_full[thread], BOXED        ? 1
                                                           : TRANSPOSED ? min(units_of_line(p), LINE_WARPS)
                                                                        : units_of_line(p));
        hc::ptx::mbarrier_init(&control.slot_empty[thread], CONSUMER_WARPS);
    }
    if (thread < STREAMS * STAGES) {
        hc::ptx::mbarrier_init(&control.stage_full[thread], 1);
        hc::ptx::mbarrier_init(&control.stage_empty[thread], CONSUMER_WARPS / STREAMS);
    }
    if (TRANSPOSED && thread < RAW_TILES)
        hc::ptx::mbarrier_init(&control.raw_full[thread / RAW_DEPTH][thread % RAW_DEPTH], 1);
    if (BOXED_EDGES && thread < BOXES_AHEAD) hc::ptx::mbarrier_init(&control.raw_full[thread][0], 1);
    if (SHARED_TILE && thread < CONSUMERS)
        hc::ptx::mbarrier_init(&control.half_way[thread], CONSUMER_WARPS / CONSUMERS);
    if (SENDERS && thread < CONSUMERS * BUFFERS) {
        hc::ptx::mbarrier_init(&control.sums_full[thread / BUFFERS][thread % BUFFERS], CONSUMER_WARPS / CONSUMERS);
        hc::ptx::mbarrier_init(&control.sums_empty[thread / BUFFERS][thread % BUFFERS], 1);
    }
    hc::ptx::fence_mbarrier_init();
    if (thread < p.taps_r && FLAT) {
        const int row = thread * p.dil_h;
        control.row_px[thread] = row % p.stride_h * p.planes_w * p.plane_px.value + row / p.stride_h * p.pitch.value;
    }
    if (thread < p.taps_s) {
        const int col = thread * p.dil_w;
        control.col_px[thread] = col % p.stride_w * p.plane_px.value + col / p.stride_w;
    }
    __syncthreads();
}
