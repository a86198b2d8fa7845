// The tile scheduler: which work tiles of a launch a block of threads takes. scheduler.py decides it.
#pragma once

#include "kernels/divisor.cuh"

namespace hc {

// A length cut into equal parts, as far as whole numbers allow: part i begins at i * length / parts, rounded down.
struct Cuts {
    Divisor parts;
    int each, left;  // length = each * parts + left

    __device__ __forceinline__ int begin(int i) const { return i * each + parts.quotient(i * left); }
    __device__ __forceinline__ int end() const { return parts.value * each + left; }
};

// Work tiles are numbered along nested loops of group, strip, image, residue class, block of filters, and place in the
// tile column.
//
// team: that many neighbouring blocks of threads take the same range of work tiles, each with filters of its own (a
// member's). So they read the same input at the same time, and all but the first find it in the L2.
//
// strip_owners (Y_JOINED): every strip is cut at the same work tiles. Each of so many blocks of threads owns a range of
// a strip, the first of which begins with the strip. Each of the spare blocks takes what remains at the ends of some
// strips: no more than it has to, as it begins more often.
struct Schedule {
    Divisor strips, images, classes, blocks, work_tiles;  // of a group, strip, image, class (a member's), tile column
    Divisor team;                                         // 1, or a block of threads for each block of filters
    Cuts ranges;                                          // of a member's work tiles
    Cuts strip_ranges, spare_strips;     // of a strip's work tiles those of its owners; strips among spare blocks
    int strip_work_tiles, strip_owners;  // of a strip; 0 owners: strips are cut anywhere
};

// `image` is 0 where all images lie end to end, `cls` the residue class, `index` the place in the tile column.
struct WorkTile {
    int group, block, strip, image, cls, index;
};

__device__ __forceinline__ WorkTile work_tile_at(const Schedule& schedule, int index, int member) {
    const int column = schedule.work_tiles.quotient(index), cls = schedule.blocks.quotient(column);
    const int image = schedule.classes.quotient(cls), strip = schedule.images.quotient(image);
    const int group = schedule.strips.quotient(strip);
    return {group,
            member + column - cls * schedule.blocks.value,
            strip - group * schedule.strips.value,
            image - strip * schedule.images.value,
            cls - image * schedule.classes.value,
            index - column * schedule.work_tiles.value};
}

// The work tiles of one block of threads: a range of neighbours, as equal as whole ones allow, cut where tile columns
// end. Each segment's are done in order, and then the second consumer's last tile is drained.
struct Segments {
    WorkTile first;      // of the current segment
    int work_tiles = 0;  // of it
    int member = 0, index, end;
    int ends_left = 0;  // of strips, after this one's

    __device__ __forceinline__ explicit Segments(const Schedule& schedule) {
        if (Y_JOINED && schedule.strip_owners > 0) {
            cut_strips(schedule);
        } else {
            const int i = schedule.team.quotient(blockIdx.x);
            member = blockIdx.x - i * schedule.team.value, index = schedule.ranges.begin(i),
            end = schedule.ranges.begin(i + 1);
        }
    }
    __device__ __forceinline__ void cut_strips(const Schedule& schedule) {
        const Cuts& ranges = schedule.strip_ranges;
        const int block = blockIdx.x, spare = block - schedule.strip_owners;
        if (spare < 0) {
            const int strip = ranges.parts.quotient(block), i = block - strip * ranges.parts.value;
            index = strip * schedule.strip_work_tiles + ranges.begin(i),
            end = strip * schedule.strip_work_tiles + ranges.begin(i + 1);
        } else {
            const int strip = schedule.spare_strips.begin(spare);
            index = strip * schedule.strip_work_tiles + ranges.end(), end = (strip + 1) * schedule.strip_work_tiles;
            ends_left = schedule.spare_strips.begin(spare + 1) - strip - 1;
        }
    }
    // Goes on to the next segment, at first to the first one; whether there is one.
    __device__ __forceinline__ bool next(const Schedule& schedule) {
        index += work_tiles;
        if (Y_JOINED && index == end && ends_left > 0)
            index += schedule.strip_ranges.end(), end += schedule.strip_work_tiles, --ends_left;
        first = work_tile_at(schedule, index, member);
        work_tiles = min(schedule.work_tiles.value - first.index, end - index);
        return work_tiles > 0;
    }
};

}  // namespace hc
