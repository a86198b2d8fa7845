// halo_sm80_pack: the filter as the fragments that halo_sm80 reads, rounded to the type that is multiplied.
//
//   packed[class of pixels][tile of groups][tile of filters][chunk][group][8 filters][slice][lane][2 words]
//
// Lane l has filter l / 4 of its eight, and of the slice the k that order.cuh gives to l % 4. Filters and k that do not
// exist are zero. One thread makes one lane's words. Nothing is kept between calls, so that weights changed in any way
// are never served stale.
#include "families/halo_sm80/weights.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; DGRAD, SPLIT and FOUR_FILTERS as in conv.cu.
using hc::i64;

constexpr int THREADS = 256;

static_assert(32 * sizeof(hc::Words2) == hc::SLICE_BYTES, "a slice of eight filters is two words of each lane");

struct Params {
    const hc::elem_t* w;
    char* packed;
    hc::FilterStrides strides;
    i64 total;  // lanes
    hc::Extents extents;
    int channels, filters, groups;  // of a group; groups
    int group_tiles, tile_groups, filter_tiles, tile_eights;
    int chunk_channels, chunks, parts, slices, taps_first;
};

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm80_pack(const __grid_constant__ Params p) {
    const i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= p.total) return;
    const int lane = index % 32;
    i64 rest = index / 32;
    const int slice = rest % p.slices;
    rest /= p.slices;
    const int eight = rest % p.tile_eights;
    rest /= p.tile_eights;
    const int tile_group = rest % p.tile_groups;
    rest /= p.tile_groups;
    const int chunk = rest % p.chunks;
    rest /= p.chunks;
    const int filter_tile = rest % p.filter_tiles;
    rest /= p.filter_tiles;
    const int group = int(rest % p.group_tiles) * p.tile_groups + tile_group;
    const int filter = hc::filter_of(filter_tile * p.tile_eights + eight, lane / 4);
    const hc::Axes axes = hc::axes_of<DGRAD>(p.extents, int(rest / p.group_tiles));
    const hc::FilterRow row = {p.w + group * p.strides.group + filter * p.strides.filter, chunk * p.chunk_channels,
                               p.channels, group < p.groups && filter < p.filters};
    const hc::Words2 words = hc::weights_of(p.strides, axes, row, p.parts, p.taps_first, slice, lane % 4);
    reinterpret_cast<hc::Words2*>(p.packed)[index] = words;
}
