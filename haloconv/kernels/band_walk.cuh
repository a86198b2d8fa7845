// Bands of rows dealt out evenly among blocks, which march down their strips.
//
// The output of a slab of channels is cut into images, strips of columns and bands of rows. In this order the bands are
// dealt out to the slab's blocks, to each as many. Blocks of neighbouring slabs run at a time: what they read and write
// lies beside each other in memory.
#pragma once

namespace hc {

// Neighbouring bands of one strip.
struct Run {
    int image, strip, first, bands;
};

// The bands of a block, run by run. Cut has, among others, slabs; strips of an image and bands of a strip; per_block,
// the bands of a block; longer, the blocks of a slab that have one more.
struct Walk {
    int slab, part;  // the block's number among those of its slab
    int at, end;     // bands

    template <class Cut>
    __device__ __forceinline__ explicit Walk(const Cut& cut, unsigned block = blockIdx.x) {
        const int number = block / (unsigned)cut.slabs;
        slab = block - number * cut.slabs;
        deal(cut, number);
    }

    // Gives the block the bands of that part of its slab.
    template <class Cut>
    __device__ __forceinline__ void deal(const Cut& cut, int to) {
        part = to;
        at = part * cut.per_block + (part < cut.longer ? part : cut.longer);
        end = at + cut.per_block + (part < cut.longer);
    }

    template <class Cut>
    __device__ __forceinline__ bool next(const Cut& cut, Run& run) {
        if (at >= end) return false;
        const int column = at / cut.bands, left = (column + 1) * cut.bands - at, own = end - at;
        run.image = column / cut.strips, run.strip = column - run.image * cut.strips;
        run.first = at - column * cut.bands, run.bands = left < own ? left : own;
        at += run.bands;
        return true;
    }
};

}  // namespace hc
