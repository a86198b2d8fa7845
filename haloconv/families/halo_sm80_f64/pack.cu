// halo_sm80_f64_pack: the filter as the fragments that halo_sm80_f64 reads.
//
//   packed[residue class][group][tile of filters][chunk][tap][octet][8 filters][lane][2 channels]
//
// Lane l has filter l / 4 of its eight and channels 2 (l % 4) and the next one of its octet. What does not exist is
// zero. One thread makes one lane's pair. Nothing is kept between calls, so that weights changed in any way are never
// served stale.
//
// Constants:
//   DGRAD     1: channels and filters change places, in one residue class after the other
//   OCTETS    octets of channels of a chunk
#include "families/halo_sm80_f64/layer.cuh"

using hc::i64;

constexpr int THREADS = 256;

static_assert(32 * sizeof(hc::Pair) == hc::EIGHT_BYTES, "an octet of an eight is a pair of each lane");

struct Params {
    const double* w;
    double* packed;
    i64 w_group, w_filter, w_channel, w_r, w_s;  // strides in elements
    i64 total;                                   // pairs
    hc::Extents extents;
    int channels, filters, groups;  // of a group; groups
    int filter_tiles, tile_eights, chunks, most_taps;
};

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm80_f64_pack(const __grid_constant__ Params p) {
    const i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= p.total) return;
    const int lane = index % 32;
    i64 rest = index / 32;
    const int eight = rest % p.tile_eights;
    rest /= p.tile_eights;
    const int octet = rest % OCTETS;
    rest /= OCTETS;
    const int tap = rest % p.most_taps;
    rest /= p.most_taps;
    const int chunk = rest % p.chunks;
    rest /= p.chunks;
    const int filter = (int(rest % p.filter_tiles) * p.tile_eights + eight) * hc::OCTET + lane / 4;
    rest /= p.filter_tiles;
    const hc::Axes axes = hc::axes_of<DGRAD>(p.extents, int(rest / p.groups));
    const hc::Axis &v = axes.vertical, &h = axes.horizontal;
    const int first = chunk * hc::CHUNK + octet * hc::OCTET + lane % 4 * 2;
    hc::Pair pair = {};
    if (filter < p.filters && tap < v.taps * h.taps) {
        const i64 r = v.first + tap / h.taps * v.step, s = h.first + tap % h.taps * h.step;
        const double* const from = p.w + rest % p.groups * p.w_group + filter * p.w_filter + r * p.w_r + s * p.w_s;
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (first + e < p.channels) pair.of[e] = from[(first + e) * p.w_channel];
    }
    reinterpret_cast<hc::Pair*>(p.packed)[index] = pair;
}
