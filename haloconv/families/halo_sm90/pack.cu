// halo_sm90_pack: the filter in the order in which halo_sm90 streams it, rounded to the type that is multiplied.
//
//   packed[group][block of BLOCK_M rows][chunk of channels][tap r][tap s][term][row m][CHUNK_BYTES, swizzled]
//
// Row m stands for one filter (fprop: k, dgrad: c), or for filter m % pack_filters of the output row or column m /
// pack_filters of an output pack; its taps are then shifted, and those that fall off the filter are zero. One thread
// makes one 16-byte piece, in all its terms. Nothing is kept between calls: weights changed in any way are never stale.
//
// SPREAD: row m of each eight stands for filter spread_row(m), for which the epilogue's buffers have that row.
//
// The channels of a chunk are in the order in which halo_sm90 stages them: every PLANES-th from the first on, then from
// the second on, and so forth.
#include "families/halo_sm90/terms.cuh"
#include "families/halo_sm90/swizzle.cuh"
#include "kernels/ceil_div.cuh"
#include "kernels/ptx/fence.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; BLOCK_M rows of a block; CHUNK_BYTES bytes of a row;
// OPERAND_TERMS values in TF32 stand for an fp32 weight; PLANES is 1, or X_JOINED of conv.cu; SPREAD is 1 where
// fp32 sums leave by pixels.
//   CLASSES_ACROSS     defined only in a strided dgrad, where the rows of a group are runs of residue classes of dx.
//                      1: a run is one class; n: each 16 rows of a run have n column classes, and rows i and i + 8
//                      are neighbouring columns (conv/classes.cuh)
using hc::i64;
using elem_t = ELEM;

constexpr int ELEMS = 16 / sizeof(elem_t), PIECES = CHUNK_BYTES / 16, THREADS = 256;
constexpr int TERMS = OPERAND_TERMS;
constexpr int PLANE_ELEMS = PIECES * ELEMS / PLANES;  // channels of a chunk that are PLANES apart

static_assert(PLANE_ELEMS % ELEMS == 0, "a piece has channels that are equally far apart");

struct Params {
    const elem_t* w;
    unsigned char* packed;
    unsigned* not_finite;                           // cleared for the launch that follows
    i64 w_filter, w_channel, w_r, w_s, w_group;     // strides in elements
    int filters, channels;                          // of a group
    int blocks, chunks, taps_r, taps_s;             // as halo_sm90 counts them
    int first_r, step_r, count_r, shift_r, pack_h;  // filter row of tap r: first + step * (r - shift * packed row)
    int first_s, step_s, count_s, shift_s, pack_w;
    int pack_filters;
    int pieces_per_block;  // 16-byte pieces of a block of rows, all chunks and taps, of one term
#ifdef CLASSES_ACROSS
    int class_rows, class_runs;      // rows of a run, runs of a group
    int filter_dil_r, filter_dil_s;  // tap r of class a is filter row (first + step * r + a) / filter_dil
#endif
};

#ifdef CLASSES_ACROSS
// The filter and the class that a row of M stands for.
struct Row {
    int filter, residue_h, residue_w;
    bool there;
};

template <class P>
__device__ __forceinline__ Row row_at(const P& p, int block, int row) {
    const int at = block * BLOCK_M + row, run = at / p.class_rows, in_run = at - run * p.class_rows;
    int filter = in_run, residue = run;
    if (CLASSES_ACROSS > 1) {
        constexpr int PAIRS = CLASSES_ACROSS > 1 ? CLASSES_ACROSS / 2 : 1;
        const int m = in_run % 16, pair = m % 8 % PAIRS;
        filter = in_run / 16 * (16 / CLASSES_ACROSS) + m % 8 / PAIRS;
        residue = run * CLASSES_ACROSS + 2 * pair + m / 8;
    }
    return {filter, residue / p.pack_w, residue % p.pack_w, run < p.class_runs && filter < p.filters};
}

// The filter's tap of index / dil; below 0 if it has none there.
__device__ __forceinline__ int tap_at(int index, int dil, int count) {
    return index >= 0 && index % dil == 0 && index / dil < count ? index / dil : -1;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm90_pack(const __grid_constant__ Params p) {
    hc::ptx::griddepcontrol_launch_dependents();  // halo_sm90 waits where it reads what is written here
    const unsigned blocks = hc::ceil_div(p.pieces_per_block, THREADS);  // of threads, for a block of rows
    const i64 block = blockIdx.x / blocks;
    const int index = blockIdx.x % blocks * THREADS + threadIdx.x;
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.not_finite = 0;
    if (index >= p.pieces_per_block) return;
    const int piece = index % PIECES, m = index / PIECES % BLOCK_M;
    const int tap = index / (PIECES * BLOCK_M);
    const int s = tap % p.taps_s, r = tap / p.taps_s % p.taps_r, chunk = tap / (p.taps_s * p.taps_r);
#ifdef CLASSES_ACROSS
    const Row at = row_at(p, int(block % p.blocks), SPREAD ? m / 8 * 8 + hc::spread_row(m % 8) : m);
    const int filter = at.filter;
    const int tap_r = tap_at(p.first_r + p.step_r * r + at.residue_h, p.filter_dil_r, p.count_r);
    const int tap_s = tap_at(p.first_s + p.step_s * s + at.residue_w, p.filter_dil_s, p.count_s);
    const bool there = at.there && tap_r >= 0 && tap_s >= 0;
    const i64 tap_elems = tap_r * p.w_r + tap_s * p.w_s;
#else
    const bool packs = p.pack_h * p.pack_w > 1;
    const int residue = packs ? m / p.pack_filters : 0, row = SPREAD ? m / 8 * 8 + hc::spread_row(m % 8) : m;
    const int filter = packs ? row % p.pack_filters : int(block % p.blocks) * BLOCK_M + row;
    const int tap_r = r - p.shift_r * (residue / p.pack_w), tap_s = s - p.shift_s * (residue % p.pack_w);
    const bool there = filter < p.filters && residue < p.pack_h * p.pack_w && (unsigned)tap_r < (unsigned)p.count_r &&
                       (unsigned)tap_s < (unsigned)p.count_s;
#endif
    const int in_chunk = piece * ELEMS;
    const int first_channel = chunk * PIECES * ELEMS + in_chunk % PLANE_ELEMS * PLANES + in_chunk / PLANE_ELEMS;
#ifdef CLASSES_ACROSS
    const elem_t* from =
        p.w + block / p.blocks * p.w_group + filter * p.w_filter + first_channel * p.w_channel + tap_elems;
#else
    const elem_t* from = p.w + block / p.blocks * p.w_group + filter * p.w_filter + first_channel * p.w_channel +
                         (p.first_r + p.step_r * tap_r) * p.w_r + (p.first_s + p.step_s * tap_s) * p.w_s;
#endif
    elem_t channel[ELEMS];
#pragma unroll
    for (int i = 0; i < ELEMS; ++i)
        channel[i] = there && first_channel + i * PLANES < p.channels ? from[i * PLANES * p.w_channel] : elem_t{};
    const i64 first = (block * (p.pieces_per_block / (PIECES * BLOCK_M)) + tap) * TERMS * BLOCK_M;  // row 0 of the tap
    unsigned char* to = p.packed + first * CHUNK_BYTES + hc::unit_offset<CHUNK_BYTES>(m, piece);
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        hc::Piece packed = hc::term_of<TERMS>(channel, term);
        if constexpr (sizeof(elem_t) == 4)  // moving bits that are not multiplied would cost power
            for (unsigned& word : packed.word) word &= 0xffffe000u;
        *reinterpret_cast<hc::Piece*>(to + term * BLOCK_M * CHUNK_BYTES) = packed;
    }
}
