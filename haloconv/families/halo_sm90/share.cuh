// Which steps of a launch of halo_sm90 a block of threads does. families/halo_sm90_share.py decides it.
#pragma once

#include "families/halo_sm90/divisor.cuh"

namespace hc {

// Steps are numbered along nested loops of group, strip, band, class, block of filters and step.
//
// team: that many neighbouring blocks of threads take the same run of steps, each with filters of its own (a member's).
// So they read the same input at the same time, and all but the first find it in the L2.
//
// strip_owners (Y_JOINED): every strip is cut at the same steps. That many blocks of threads own runs of a strip, from
// its first step on. Each of the spare blocks takes what remains at the ends of some strips: no more than it has to, as
// it begins more often.
struct Share {
    Divisor strips, bands, classes, blocks, steps;  // of a group, strip, band, class (a member's), column
    Divisor team;                                   // 1, or a block of threads for each block of filters
    Cuts runs;                                      // of a member's steps
    Cuts strip_runs, spare_strips;                  // of a strip's steps those of its owners; strips among spare blocks
    int strip_steps, strip_owners;                  // steps of a strip; 0 owners: strips are cut anywhere
};

struct Tile {
    int group, block, strip, band, cls, step;
};

__device__ __forceinline__ Tile tile_at(const Share& share, int index, int member) {
    const int column = share.steps.quotient(index), cls = share.blocks.quotient(column);
    const int band = share.classes.quotient(cls), strip = share.bands.quotient(band);
    const int group = share.strips.quotient(strip);
    return {group,
            member + column - cls * share.blocks.value,
            strip - group * share.strips.value,
            band - strip * share.bands.value,
            cls - band * share.classes.value,
            index - column * share.steps.value};
}

// The steps of one block of threads: a run of neighbours, as equal as whole steps allow, cut where columns end. Each
// segment's steps are done in order, and the second consumer ends with a step more.
struct Segments {
    Tile first;     // of the current segment
    int steps = 0;  // of it
    int member = 0, index, end;
    int ends_left = 0;  // of strips, after this one's

    __device__ __forceinline__ explicit Segments(const Share& share) {
        if (Y_JOINED && share.strip_owners > 0) {
            cut_strips(share);
        } else {
            const int i = share.team.quotient(blockIdx.x);
            member = blockIdx.x - i * share.team.value, index = share.runs.begin(i), end = share.runs.begin(i + 1);
        }
    }
    __device__ __forceinline__ void cut_strips(const Share& share) {
        const Cuts& runs = share.strip_runs;
        const int block = blockIdx.x, spare = block - share.strip_owners;
        if (spare < 0) {
            const int strip = runs.parts.quotient(block), i = block - strip * runs.parts.value;
            index = strip * share.strip_steps + runs.begin(i), end = strip * share.strip_steps + runs.begin(i + 1);
        } else {
            const int strip = share.spare_strips.begin(spare);
            index = strip * share.strip_steps + runs.end(), end = (strip + 1) * share.strip_steps;
            ends_left = share.spare_strips.begin(spare + 1) - strip - 1;
        }
    }
    // Goes on to the next segment, at first to the first one; whether there is one.
    __device__ __forceinline__ bool next(const Share& share) {
        index += steps;
        if (Y_JOINED && index == end && ends_left > 0)
            index += share.strip_runs.end(), end += share.strip_steps, --ends_left;
        first = tile_at(share, index, member);
        steps = min(share.steps.value - first.step, end - index);
        return steps > 0;
    }
};

}  // namespace hc
