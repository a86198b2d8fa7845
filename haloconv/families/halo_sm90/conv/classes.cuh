// A strided dgrad: the residue classes of dx as rows of M, and how their sums become neighbours in memory again.
//
// Place i of an axis has a pixel of every residue class a: i * step + a - before. All of them gather the same pixels of
// dy, so the classes are just more rows of M. A group has runs of `class_rows` rows. Where neighbours in memory are
// filters, a run is one class, padded to a multiple of 16 rows, and CLASS_ROWS neighbouring rows are neighbours in dx.
// Where neighbours are pixels, each 16 rows, those of a warp, have ACROSS column classes of 16 / ACROSS filters: rows i
// and i + 8, which a lane holds, are neighbouring columns, and a warp's buffer has whole pieces of rows of dx.
#pragma once

#include "families/halo_sm90/conv/shape.cuh"

namespace hc {

// What rows of M from `row` of a group on stand for: the first filter, how many are left, and the (first) class.
struct ClassRows {
    int first, count, residue;
};

template <int ACROSS, class P>
__device__ __forceinline__ ClassRows class_rows_at(const P& p, int row) {
    const int run = p.class_rows.quotient(row), in_run = row - run * p.class_rows.value;
    const int first = ACROSS > 1 ? in_run / WARP_ROWS * (WARP_ROWS / ACROSS) : in_run;
    if (run >= p.class_runs) return {p.filters, 0, 0};
    return {first, p.filters - first, run * ACROSS};
}

// Row of dx of class `residue` of row `run` of places of a tile column; may be outside.
template <class P>
__device__ __forceinline__ int class_row(const P& p, const WorkTile& column, int run, int residue) {
    return (column.cls + p.schedule.classes.value * run) * p.step_h + residue / p.pack_w - p.before_h;
}

// A warp's buffer as lines of the pixels of its ACROSS classes, one for each of 16 / ACROSS filters.
template <class Elem, int ACROSS>
struct LineBuffer {
    static constexpr int PIXELS = ACROSS * PixelBuffer<Elem>::PIXELS, LINES = WARP_ROWS / ACROSS;
    static constexpr int PIECE_PX = 8 / sizeof(Elem), PIECES = PIXELS / PIECE_PX;  // of a line

    // Pixel `px` of line `line`, in bytes.
    static __device__ __forceinline__ int offset(int line, int px) {
        const int byte = (line * PIXELS + px) * int(sizeof(Elem));
        return unit_offset<128>(byte / 128, byte % 128 / 16) + byte % 16;
    }
};

// Fills a warp's buffer, from pixel group `first_group` on. Lines are `shift` pixels further on, their last ones at the
// begin.
template <class Elem, int ACROSS, int COUNT, class Finished>
__device__ __forceinline__ void fill_across(char* buffer, int lane, const float (&sums)[COUNT], int first_group,
                                            int shift, const Finished& finish) {
    using Buffer = LineBuffer<Elem, ACROSS>;
    constexpr int PAIRS = ACROSS / 2;
    struct alignas(2 * sizeof(Elem)) Pair {
        Elem px[2];
    };
    const int line = lane / 4 / PAIRS;
    const int first = lane % 4 * 2 * ACROSS + lane / 4 % PAIRS * 2 + shift;
#pragma unroll
    for (int i = 0; i < PixelBuffer<Elem>::PIXELS / 4; ++i) {
        const int group = i / 2, odd = i % 2, from = 4 * (first_group + group) + odd;
        const int px = first + (8 * group + odd) * ACROSS;
        const Pair pair = {from_acc<Elem>(finish(sums[from], 0)), from_acc<Elem>(finish(sums[from + 2], 1))};
        if (shift % 2 == 0) {
            *reinterpret_cast<Pair*>(buffer + Buffer::offset(line, px % Buffer::PIXELS)) = pair;
        } else {
            *reinterpret_cast<Elem*>(buffer + Buffer::offset(line, px % Buffer::PIXELS)) = pair.px[0];
            *reinterpret_cast<Elem*>(buffer + Buffer::offset(line, (px + 1) % Buffer::PIXELS)) = pair.px[1];
        }
    }
}

// Stores the lines of a warp's buffer in pieces of 8 bytes. Pixel 0 of the first line, if it is not shifted, is column
// `col` of its row, which begins at `rows.y` and has `cols` columns. Rows and column col - shift are at multiples of 8
// bytes.
template <class Elem, int ACROSS>
__device__ __forceinline__ void store_lines(const char* buffer, int lane, int col, int shift, int cols,
                                            const Rows<Elem>& rows) {
    using Buffer = LineBuffer<Elem, ACROSS>;
    constexpr int PX = Buffer::PIECE_PX;
    struct alignas(8) Piece8 {
        Elem px[PX];
    };
#pragma unroll
    for (int i = 0; i < Buffer::PIECES * Buffer::LINES / 32; ++i) {
        const int piece = i * 32 + lane, line = piece / Buffer::PIECES, px = piece % Buffer::PIECES * PX;
        const int first = col - shift + px;
        const Piece8 values = *reinterpret_cast<const Piece8*>(buffer + Buffer::offset(line, px));
        Elem* to = rows.y + line * rows.stride + first;
        if (line >= rows.count) continue;
        if (px > 0 || shift == 0) {  // all in the row, or all outside
            if ((unsigned)first < (unsigned)cols) *reinterpret_cast<Piece8*>(to) = values;
        } else {
#pragma unroll
            for (int j = 0; j < PX; ++j) {
                const int at = j + (j < shift ? Buffer::PIXELS : 0);
                if ((unsigned)(first + at) < (unsigned)cols) to[at] = values.px[j];
            }
        }
    }
}

// Stores the lines of a warp's buffer element by element, a pixel for each lane. place_of(px, a) is the place of class
// a of pixel px.
template <class Elem, int ACROSS, class PlaceOf>
__device__ __forceinline__ void store_line_elements(const char* buffer, int lane, const PlaceOf& place_of,
                                                    const Rows<Elem>& rows) {
    using Buffer = LineBuffer<Elem, ACROSS>;
#pragma unroll 1
    for (int px = lane; px < Buffer::PIXELS; px += 32) {
        const Place place = place_of(px / ACROSS, px % ACROSS);
        Elem* to = rows.y + place.offset;
#pragma unroll 1
        for (int line = 0; place.inside && line < rows.count; ++line, to += rows.stride)
            *to = *reinterpret_cast<const Elem*>(buffer + Buffer::offset(line, px));
    }
}

// Stores the lines of a warp's buffer in pieces of PX pixels, at most a place's. place_of is that of
// store_line_elements. Rows and the first pixel of each place, `shift` pixels further on, are at multiples of a piece.
// A piece of two places is whole where these are neighbours in a row; its other pixels go one by one.
template <class Elem, int ACROSS, int PX, class PlaceOf>
__device__ __forceinline__ void store_line_pieces(const char* buffer, int lane, int shift, const PlaceOf& place_of,
                                                  const Rows<Elem>& rows) {
    using Buffer = LineBuffer<Elem, ACROSS>;
    static_assert(Buffer::PIXELS % (32 * PX) == 0 && ACROSS % PX == 0, "lanes have as many pieces, of two places");
    struct alignas(PX * sizeof(Elem)) Piece {
        Elem px[PX];
    };
    const auto place_at = [&](int px) { return place_of(px / ACROSS, px % ACROSS); };
#pragma unroll 1
    for (int px = lane * PX; px < Buffer::PIXELS; px += 32 * PX) {
        const int first = px < shift ? px - shift + Buffer::PIXELS : px - shift;
        const Place begin = place_at(first);
        Place end = {begin.offset + PX - 1, begin.inside};
        if (shift > 0) end = place_at(px - shift + PX - 1);
        if (begin.inside && end.inside && end.offset == begin.offset + PX - 1) {
            Elem* const to = rows.y + begin.offset;
#pragma unroll
            for (int line = 0; line < Buffer::LINES; ++line)
                if (line < rows.count)
                    *reinterpret_cast<Piece*>(to + line * rows.stride) =
                        *reinterpret_cast<const Piece*>(buffer + Buffer::offset(line, px));
        } else if (begin.inside || end.inside) {
#pragma unroll 1
            for (int i = 0; i < PX; ++i) {
                const Place place = place_at(px + i < shift ? px + i - shift + Buffer::PIXELS : px + i - shift);
#pragma unroll 1
                for (int line = 0; place.inside && line < rows.count; ++line)
                    rows.y[place.offset + line * rows.stride] =
                        *reinterpret_cast<const Elem*>(buffer + Buffer::offset(line, px + i));
            }
        }
    }
}

// Stores 32 pixels of a consumer's buffer, from pixel `first_px` on, as store_by_filters does. Of the lane's pixel each
// of PARTS blocks of rows has an offset, that of its first filter, and a count of filters that exist.
template <class Elem, int ROW_BYTES, bool VECTOR, int PARTS>
__device__ __forceinline__ void store_by_class(const char* buffer, int warp, int first_px, const i64 (&offsets)[PARTS],
                                               const int (&counts)[PARTS], Elem* y) {
    using Buffer = FilterBuffer<Elem, ROW_BYTES>;
    constexpr int ELEMS = 8 / sizeof(Elem), LANES = CONSUMER_ROWS / ELEMS, PER_STEP = 32 / LANES;
    struct alignas(8) Part {
        Elem elem[ELEMS];
    };
    const int lane = threadIdx.x % 32, row = lane % LANES * ELEMS;
    const int own = row / (CONSUMER_ROWS / PARTS), filter = row % (CONSUMER_ROWS / PARTS);
#pragma unroll
    for (int i = 0; i < 32 / PER_STEP / 4; ++i) {
        const int px = (4 * i + warp) * PER_STEP + lane / LANES;
        i64 offset = 0;
        int count = 0;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const i64 part_offset = __shfl_sync(~0u, offsets[part], px);
            const int part_count = __shfl_sync(~0u, counts[part], px);
            if (part == own) offset = part_offset, count = part_count;
        }
        const Part part = *reinterpret_cast<const Part*>(buffer + Buffer::offset(first_px + px, row * sizeof(Elem)));
        Elem* to = y + offset + filter;
        if (VECTOR) {
            if (filter < count) *reinterpret_cast<Part*>(to) = part;
        } else {
#pragma unroll
            for (int j = 0; j < ELEMS; ++j)
                if (filter + j < count) to[j] = part.elem[j];
        }
    }
}

}  // namespace hc
