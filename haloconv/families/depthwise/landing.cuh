// Strips of planes that land in shared memory by bulk copies.
//
// Rows that follow one another in memory are one copy, which moves many bytes for one instruction of one thread.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/ptx/bulk.cuh"

namespace hc::landing {

constexpr int PIECE_BYTES = 16;

// The strips of all planes, in the order in which blocks do them: each block has a run of neighbours.
struct Cut {
    int units, images, strips;  // strips of all planes; planes of a channel, strips of a plane
    int rows;                   // of the output, of a strip
};

struct Unit {
    int channel, image, strip;

    __device__ __forceinline__ void advance(const Cut& cut) {
        if (++strip < cut.strips) return;
        strip = 0;
        if (++image < cut.images) return;
        image = 0, ++channel;
    }
};

__device__ __forceinline__ Unit unit_at(const Cut& cut, int index) {
    return {index / cut.strips / cut.images, index / cut.strips % cut.images, index % cut.strips};
}

// The first unit of a block, which is the end of those of the one before.
__device__ __forceinline__ int first_unit(const Cut& cut, unsigned block) {
    return int((unsigned long long)cut.units * block / gridDim.x);
}

// The rows that strips of a tensor have.
struct Planes {
    i64 image, channel;  // strides of the tensor, in elements; rows are without gaps
    int extent, width;   // rows of a plane, and pieces of 16 bytes of a row
    int rows, pad_top;   // of a strip, halo included; above the first strip's first
};

// What of a strip is inside the image.
struct Source {
    const char* at;
    int bytes;

    template <class Elem>
    __device__ __forceinline__ void locate(const Planes& s, const Elem* tensor, int channel, int image, int strip_row) {
        const int first = strip_row - s.pad_top, begin = first > 0 ? first : 0;
        const int end = first + s.rows < s.extent ? first + s.rows : s.extent;
        const int row_bytes = s.width * PIECE_BYTES;
        at = reinterpret_cast<const char*>(tensor + image * s.image + channel * s.channel) + (i64)begin * row_bytes;
        bytes = end > begin ? (end - begin) * row_bytes : 0;
    }

    __device__ __forceinline__ void copy(char* landing, ptx::u64* full) const {
        if (bytes) ptx::cp_async_bulk_shared_global(landing, at, (unsigned)bytes, full);
    }
};

// The units of a block that have not been asked for, and where the first one's strip is. One thread has it, in shared
// memory: registers are few.
struct Ahead {
    Source source;
    int left;
    Unit next;

    // locate(unit) finds the source. Where planes are strips, the next image's is a stride further on.
    template <class Elem, class Locate>
    __device__ __forceinline__ void advance(const Cut& cut, const Planes& planes, Elem, Locate locate) {
        --left;
        next.advance(cut);
        if (cut.strips > 1 || next.image == 0) return locate(next);
        source.at += planes.image * (i64)sizeof(Elem);
    }
};

}  // namespace hc::landing
