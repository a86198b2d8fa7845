// The consumers of halo_sm90_wgrad: products of lines, and partial sums.
#pragma once

#include "families/halo_sm90/multiplied.cuh"
#include "families/halo_sm90/wgrad/fragment.cuh"
#include "families/halo_sm90/wgrad/split.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace hc::wgrad {

using multiply_t = MultipliedAs<elem_t>::type;

using Sums = float[COLUMN_GROUPS][ROWS][FILTERS / 2];

// Descriptor units from the start of a line of dy to step `step`.
__device__ __forceinline__ int step_units(int step) {
    if (Y_INNER) return step * (DEPTH * Y_ROW_BYTES / 16);
    return step / 4 * (Y_RING / 16) + step % 4 * 2;
}

// Gives a box of dy back, and the box of x that came with it, which this thread has read.
__device__ __forceinline__ void give_back(ptx::u64* empty) {
    if constexpr (X_STORED)
        ptx::mbarrier_arrive(empty);
    else
        arrive_warp(empty);
}

// The stage of the oldest box of dy that the box before met, until that is given back.
struct Done {
    int stage = -1;

    __device__ __forceinline__ void release(const Smem& smem) {
        if (stage < 0) return;
        if (!X_STORED) ptx::fence_proxy_async_shared();  // before TMA writes here again
        give_back(&smem.y_empty[stage]);
        stage = -1;
    }
};

template <bool EDGE>
struct Edge {
    static constexpr bool value = EDGE;
};

// What a line is multiplied by: for each row of taps the descriptor of its line of dy, if it has one.
struct Lines {
    ptx::u64 dy[ROWS];
    unsigned valid;  // a bit for each row of taps
};

// Moves on to the next lines of the ring.
__device__ __forceinline__ void next_lines(Lines& lines) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) lines.dy[r] = ptx::moved(lines.dy[r], Y_LINE / 16);
}

// EDGE: not all rows of taps have a line. Without that question the products of a step stand in one block of code.
template <bool EDGE>
__device__ __forceinline__ void multiply_step(Sums& sums, const Fragments& x, const Lines& lines, int step) {
    ptx::wgmma_fence();
#pragma unroll
    for (int group = 0; group < COLUMN_GROUPS; ++group)
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (!EDGE || lines.valid >> r & 1)
                ptx::wgmma_rs<multiply_t, FILTERS, Y_INNER != 0>(sums[group][r], x[group],
                                                                 ptx::moved(lines.dy[r], step_units(step)), true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<EDGE ? 0 : 1>();
}

// Two fragments alternate, from line to line, too: one is loaded while wgmma reads the other.
struct FragmentPair {
    Fragments even, odd;
    bool is_odd = false;
};

// A consumer's steps in four that follow one another in a line, a span of 128 bytes where dy is K-major: the compiler
// knows how far apart they are. 0 where it does not, or where fragments of many column groups leave no registers.
constexpr int SPAN_STEPS = BOX_ROWS == 1 && COLUMN_GROUPS <= 2 && (SPLIT_P == 1 || SPLIT_P == 2) ? 4 / SPLIT_P : 0;

// Multiplies the whole spans of a line of x before step `steps`. Returns the step behind them.
__device__ __forceinline__ int multiply_spans(Sums& sums, FragmentPair& pair, Lines lines, const char* x,
                                              const Lanes& lanes, int step, int steps, const Masks& masks,
                                              const Smem& smem, Done& done) {
    constexpr int LAST = 3 / SPLIT_P * SPLIT_P;  // from the first step of a span to the last one
    if (step + LAST >= steps) return step;
    if (pair.is_odd) ptx::wgmma_wait_group<0>();
    pair.is_odd = false;
    x += step * Lanes::STEP_BYTES;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) lines.dy[r] = ptx::moved(lines.dy[r], step_units(step));
#pragma unroll 1
    for (; step + LAST < steps; step += 4, x += 4 * Lanes::STEP_BYTES) {
#pragma unroll
        for (int i = 0; i < SPAN_STEPS; ++i) {
            Fragments& a = i % 2 ? pair.odd : pair.even;
#pragma unroll
            for (int group = 0; group < COLUMN_GROUPS; ++group) {
                lanes.load(a[group], x, group, i * SPLIT_P);
                if (IMAGE_COLUMNS > 0 && is_masked(SPLIT_P == 1 ? i : step + i * SPLIT_P, steps)) mask(a[group], masks);
            }
            multiply_step<false>(sums, a, lines, i * SPLIT_P);
            if (i == 0) done.release(smem);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) lines.dy[r] = ptx::moved(lines.dy[r], step_units(4));
    }
    return step;
}

// One line of x, of whose steps `whole` have no pixel behind the last one that dy has.
template <bool EDGE>
__device__ __forceinline__ void multiply_line(Sums& sums, FragmentPair& pair, const Lines& lines, const char* x,
                                              const Lanes& lanes, int step, int steps, int whole, const Masks& masks,
                                              const Smem& smem, Done& done) {
    if constexpr (!EDGE && SPAN_STEPS > 0)
        step = multiply_spans(sums, pair, lines, x, lanes, step, whole, masks, smem, done);
    const auto multiply = [&](Fragments& a, int step) {
#pragma unroll
        for (int group = 0; group < COLUMN_GROUPS; ++group) {
            lanes.load(a[group], x, group, step);
            if (is_masked(step, steps)) mask(a[group], masks);
        }
        multiply_step<EDGE>(sums, a, lines, step);
    };
    if (EDGE) ptx::wgmma_wait_group<0>();
#pragma unroll 1
    for (; step < steps; step += SPLIT_P) {
        if (EDGE || !pair.is_odd) {
            multiply(pair.even, step);
            done.release(smem);
            if (EDGE) continue;
            pair.is_odd = true;
            if ((step += SPLIT_P) >= steps) break;
        }
        multiply(pair.odd, step);
        done.release(smem);
        pair.is_odd = false;
    }
}

// Several terms: wgmma sums PART_STEPS steps at a time, of three products each, and those partial sums are added to
// the tile's, rounded to nearest: wgmma cuts toward zero, and what it cuts off sums of one sign adds up.
template <int STEPS>
struct Split {
    Fragment first[STEPS], second[STEPS];
};

// Adds STEPS steps of COUNT rows of taps from row R on, whose lines of dy follow one another: `dy` is the oldest, that
// of the last row. The small products come first, and count only where they are finite: the second term of an infinity
// is none, so that the large ones say which sums are infinite or NaN. The compiler knows STEPS, or it would spill.
template <int R, int COUNT, int STEPS>
__device__ __forceinline__ void multiply_part(float (&sums)[ROWS][FILTERS / 2], const Split<STEPS>& x, ptx::u64 dy,
                                              int step) {
    constexpr int N = COUNT * FILTERS;
    float part[N / 2];
    const auto multiply = [&](const Fragment& a, int i, int dy_term, bool accumulate) {
        const int units = step_units(step + i * SPLIT_P) + dy_term * (Y_TERM / 16);
        ptx::wgmma_rs<multiply_t, N, false>(part, a, ptx::moved(dy, units), accumulate);
    };
    const auto settle = [&] {
        ptx::wgmma_commit_group(), ptx::wgmma_wait_group<0>();
        ptx::wgmma_hold(part);
    };
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) multiply(x.second[i], i, 0, i > 0), multiply(x.first[i], i, 1, true);
    settle();
    float none[4] = {};  // stays zero if all are numbers
#pragma unroll
    for (int i = 0; i < N / 2; ++i) none[i % 4] = fmaf(part[i], 0.f, none[i % 4]);
    if (__any_sync(~0u, none[0] + none[1] + (none[2] + none[3]) != 0)) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) part[i] = fabsf(part[i]) <= 3.402823466e38f ? part[i] : 0.f;
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) multiply(x.first[i], i, 0, true);
    settle();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[R + COUNT - 1 - i / (FILTERS / 2)][i % (FILTERS / 2)] += part[i];
}

// multiply_part for each row of taps from R on that has a line of dy.
template <int R, int STEPS>
__device__ __forceinline__ void multiply_met_rows(float (&sums)[ROWS][FILTERS / 2], const Split<STEPS>& x,
                                                  const Lines& lines, int step) {
    if (lines.valid >> R & 1) multiply_part<R, 1>(sums, x, lines.dy[R], step);
    if constexpr (R + 1 < ROWS) multiply_met_rows<R + 1>(sums, x, lines, step);
}

// Multiplies STEPS steps, from `step` on, of a line of `steps`.
template <bool EDGE, int STEPS>
__device__ __forceinline__ void multiply_steps(Sums& sums, const Lines& lines, const char* x, const Lanes& lanes,
                                               int step, int steps, const Masks& masks) {
#pragma unroll
    for (int group = 0; group < COLUMN_GROUPS; ++group) {
        Split<STEPS> split;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            Fragment a;
            lanes.load(a, x, group, step + i * SPLIT_P);
            if (step + i * SPLIT_P + 1 == steps) mask(a, masks);
#pragma unroll
            for (int j = 0; j < 4; ++j) split.first[i][j] = first_term(a[j]), split.second[i][j] = second_term(a[j]);
        }
        if constexpr (EDGE)
            multiply_met_rows<0>(sums[group], split, lines, step);
        else
            multiply_part<0, ROWS>(sums[group], split, lines.dy[ROWS - 1], step);
    }
}

// One line of x in several terms. What is multiplied is read when this returns.
template <bool EDGE>
__device__ __forceinline__ void multiply_terms(Sums& sums, const Lines& lines, const char* x, const Lanes& lanes,
                                               int step, int steps, const Masks& masks) {
#pragma unroll 1
    for (; step + (PART_STEPS - 1) * SPLIT_P < steps; step += PART_STEPS * SPLIT_P)
        multiply_steps<EDGE, PART_STEPS>(sums, lines, x, lanes, step, steps, masks);
#pragma unroll 1
    for (; PART_STEPS > 1 && step < steps; step += SPLIT_P)
        multiply_steps<EDGE, 1>(sums, lines, x, lanes, step, steps, masks);
}

// Steps of a line of a box of several, of at most 128 bytes of pixels. 0 for others, and where fragments of several
// column groups leave too few registers: the compiler would wait for each product.
constexpr bool STEPS_KNOWN = TERMS == 1 && BOX_ROWS > 1 && STRIP* SIZE <= 128 && SPLIT_P == 1 && COLUMN_GROUPS == 1;
constexpr int LINE_STEPS = STEPS_KNOWN ? STRIP / DEPTH : 0;

// `count` lines of x that follow one another, as do those of dy, of LINE_STEPS steps each. If that is odd, in pairs: so
// each step has a fragment of its own, and nothing is asked but how many lines are left.
__device__ __forceinline__ void multiply_short_lines(Sums& sums, FragmentPair& pair, Lines lines, const char* x,
                                                     const Lanes& lanes, int count, const Masks& masks,
                                                     const Smem& smem, Done& done) {
    const auto multiply = [&](Fragments& first, Fragments& second, bool may_release) {  // a line
#pragma unroll
        for (int step = 0; step < LINE_STEPS; ++step) {
            Fragments& a = step % 2 ? second : first;
#pragma unroll
            for (int group = 0; group < COLUMN_GROUPS; ++group) {
                lanes.load(a[group], x, group, step);
                if (is_masked(step, LINE_STEPS)) mask(a[group], masks);
            }
            multiply_step<false>(sums, a, lines, step);
            if (may_release && step == 0) done.release(smem);
        }
        x += X_LINE, next_lines(lines);
    };
    constexpr int AT_ONCE = LINE_STEPS % 2 + 1;
    if (pair.is_odd) ptx::wgmma_wait_group<0>();  // the even fragment is loaded next
    pair.is_odd = AT_ONCE == 2 && count % 2 == 1;
#pragma unroll 1
    for (; count >= AT_ONCE; count -= AT_ONCE) {
        multiply(pair.even, pair.odd, true);
        if (AT_ONCE == 2) multiply(pair.odd, pair.even, false);
    }
    if (AT_ONCE == 2 && count > 0) multiply(pair.even, pair.odd, true);
}

// Adds the sums to those of the same consumer in memory, or writes them there if they are the first: a register of 128
// threads is 512 bytes side by side. wgrad_sum.cu knows the order. All loads are in flight together: no branch stands
// between them.
__device__ __forceinline__ void write_sums(Sums& sums, float* to, bool first) {
    float* const own = &sums[0][0][0];
    to += threadIdx.x % 128;
    if (!first) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) own[i] += to[i * 128];
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) to[i * 128] = own[i];
}

// The rows of taps that meet a line of dy with line `line` of a run, a bit each.
__device__ __forceinline__ unsigned met(const Params& p, const Tile& tile, const Place& place, int line) {
    const bool inside = place.row + line * place.row_step < p.h;
    unsigned valid = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = place.dy_row + (line + ROWS - 1 - r) * line_step(p);
        if (inside && (unsigned)row < (unsigned)p.rows && tile.row + r * p.blocks.row_step < p.taps_r) valid |= 1u << r;
    }
    return valid;
}

// The lines of a run that every row of taps meets: from `first` to before `last`.
struct Inner {
    int first, last;

    __device__ __forceinline__ Inner(const Params& p, const Tile& tile, const Place& place) {
        first = place.dy_row < 0 ? (line_step(p) - 1 - place.dy_row) / line_step(p) : 0;
        const int of_x = (p.h - place.row + place.row_step - 1) / place.row_step;
        const int of_dy = (p.rows - place.dy_row + line_step(p) - 1) / line_step(p) - (ROWS - 1);
        last = tile.row + (ROWS - 1) * p.blocks.row_step < p.taps_r ? min(of_x, of_dy) : 0;
    }
};

// The lines of a box of x. `newest` is the place in dy's ring of the youngest line that the first of them meets.
// `multiply(edge, lines, x, count)` multiplies a line, or where the compiler knows its steps so many.
template <class Multiply>
__device__ __forceinline__ void multiply_box(const Params& p, const Tile& tile, const Place& place, const Inner& inner,
                                             int box, int newest, ptx::u64 ring, const char* x,
                                             const Multiply& multiply) {
#pragma unroll 1
    for (int line = box * BOX_ROWS, end = line + BOX_ROWS; line < end;) {
        const bool is_inner = line >= inner.first && line < inner.last;
        Lines lines{{}, is_inner ? 0 : met(p, tile, place, line)};
        int count = 1;  // lines that follow one another in both rings
        if (BOX_ROWS > 1 && is_inner) count = min(end, inner.last) - line;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int at = newest - r < 0 ? newest - r + Y_LINES : newest - r;
            lines.dy[r] = ptx::moved(ring, at * (Y_LINE / 16));
            if (BOX_ROWS > 1) count = min(count, Y_LINES - at);
        }
        line += count, newest += count;
        newest = newest < Y_LINES ? newest : newest - Y_LINES;
        if constexpr (LINE_STEPS > 0) {
            if (is_inner) multiply(Edge<false>{}, lines, x, count), x += count * X_LINE;
        } else {
            for (; is_inner && count > 0; --count, x += X_LINE, next_lines(lines)) multiply(Edge<false>{}, lines, x, 1);
        }
        if (is_inner) continue;
        if (lines.valid) multiply(Edge<true>{}, lines, x, 1);
        x += X_LINE;
    }
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    constexpr int PART_BYTES = Y_INNER ? FILTERS / Y_SPAN * Y_RING : FILTERS * 128;
    Walk walk(p.cut);
    const Tile tile(p.blocks, walk.slab);
    const int owner = warpgroup % OWNERS, first_step = SPLIT_P > 1 ? warpgroup / OWNERS : 0;
    const Part part(owner);
    const Lanes lanes(p, tile, part);
    float* const partials = p.partials +
                            ((i64)(walk.part * SPLIT_P + first_step) * p.cut.slabs + walk.slab) * TILE_SUMS +
                            owner * OWNER_SUMS;
    const ptx::u64 ring = ptx::smem_descriptor(ptx::shared_address(smem.y + part.k * PART_BYTES), Y_INNER ? Y_RING : 16,
                                               8 * Y_ROW_BYTES, Y_ROW_BYTES);
    Sums sums = {};
    FragmentPair pair;
    Cursor x_at, y_at;
    int steps = 0;  // that the sums have
    bool first = true;
    const auto settle = [&] {
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int i = 0; i < COLUMN_GROUPS * ROWS; ++i) ptx::wgmma_hold(sums[i / ROWS][i % ROWS]);
    };
    for (Run run; walk.next(p.cut, run);) {
        const Place place(p, tile, run);
        const Inner inner(p, tile, place);
        const int pixels = place.pixels(p), line_steps = (pixels + DEPTH - 1) / DEPTH;
        Masks masks;
        mask_pixels(masks, pixels);
        int oldest = y_at.index;
        for (int i = 0; i < AHEAD; ++i, y_at.advance(Y_STAGES)) wait(&smem.y_full[y_at.index], y_at.parity);
        Done done;
        for (int box = 0; box < run.bands; ++box, x_at.advance(X_STAGES), y_at.advance(Y_STAGES)) {
            wait(&smem.y_full[y_at.index], y_at.parity);
            wait(&smem.x_full[x_at.index], x_at.parity);
            const int newest = oldest * BOX_ROWS + ROWS - 1;  // the line of dy that the first line meets, in the ring
            const auto multiply = [&](auto edge, const Lines& lines, const char* x, int count) {
                constexpr bool EDGE = decltype(edge)::value;
                if constexpr (TERMS > 1)
                    multiply_terms<EDGE>(sums, lines, x, lanes, first_step, line_steps, masks);
                else if constexpr (!EDGE && LINE_STEPS > 0)
                    multiply_short_lines(sums, pair, lines, x, lanes, count, masks, smem, done);
                else
                    multiply_line<EDGE>(sums, pair, lines, x, lanes, first_step, line_steps, pixels / DEPTH, masks,
                                        smem, done);
            };
            multiply_box(p, tile, place, inner, box, newest < Y_LINES ? newest : newest - Y_LINES, ring,
                         smem.x + x_at.index * (BOX_ROWS * X_LINE), multiply);
            if (done.stage >= 0) ptx::wgmma_wait_group<0>(), done.release(smem);
            done.stage = oldest;
            oldest = oldest + 1 == Y_STAGES ? 0 : oldest + 1;
            steps += BOX_ROWS * line_steps;
            const bool last = box + 1 == run.bands && walk.at == walk.end;
            if (steps < FLUSH_STEPS && !last) continue;
            settle();
            write_sums(sums, partials, first);
            first = false, steps = 0;
#pragma unroll
            for (int i = 0; i < SUMS; ++i) (&sums[0][0][0])[i] = 0;
        }
        settle();
        done.release(smem);
        for (int i = 0; i < AHEAD; ++i) {
            give_back(&smem.y_empty[oldest]);
            oldest = oldest + 1 == Y_STAGES ? 0 : oldest + 1;
        }
    }
}

}  // namespace hc::wgrad
