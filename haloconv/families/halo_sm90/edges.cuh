// What stands outside the image where it is no zeros: other pixels of it, which a padding mode names for each axis, or
// rows of a second tensor, the halo.
//
// The constants EDGE_ROWS, or HALO_ROWS in its place, and EDGE_COLS say which. Without them all outside is zeros, and
// HaloParams lacks some fields. A line is staged from the row that its own stands for. Loads find each pixel where it
// stands; where TMA brings rows of the image with zeros left and right of them, a warp overwrites these.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

// As torch.nn.functional.pad. HALO, of rows alone: those above and below the image, all that outputs read, follow one
// another in the halo.
enum class Edge { ZEROS, CIRCULAR, REFLECT, REPLICATE, HALO };

#if defined(HALO_ROWS)
#define EDGES 1
constexpr Edge ROW_EDGE = Edge::HALO, COL_EDGE = EDGE_COLS;
#elif defined(EDGE_ROWS)
#define EDGES 1
constexpr Edge ROW_EDGE = EDGE_ROWS, COL_EDGE = EDGE_COLS;
#else
#define EDGES 0
constexpr Edge ROW_EDGE = Edge::ZEROS, COL_EDGE = Edge::ZEROS;
#endif

// The place that stands at `at` of an axis of `extent` pixels. Outputs read none that is further outside than a mode
// allows; for one that they do not read it may be outside again.
template <Edge MODE>
__device__ __forceinline__ int at_edge(int at, int extent) {
    if constexpr (MODE == Edge::CIRCULAR) return at < 0 ? at + extent : at >= extent ? at - extent : at;
    if constexpr (MODE == Edge::REFLECT) return at < 0 ? -at : at >= extent ? 2 * (extent - 1) - at : at;
    if constexpr (MODE == Edge::REPLICATE) return min(max(at, 0), extent - 1);
    return at;
}

// The row that stands at row `at`. Rows of the halo are counted on from the image's last one.
template <class P>
__device__ __forceinline__ int row_at_edge(const P& p, int at) {
    if constexpr (ROW_EDGE == Edge::HALO) return at < 0 ? at + p.h + p.halo_top : at >= p.h ? at + p.halo_top : at;
    return at_edge<ROW_EDGE>(at, p.h);
}

// Whether there is such a row; else it is zeros.
template <class P>
__device__ __forceinline__ bool has_row(const P& p, int row) {
    if constexpr (ROW_EDGE == Edge::HALO) return (unsigned)row < unsigned(p.h + p.halo_rows);
    return (unsigned)row < (unsigned)p.h;
}

// Columns outside the image that outputs read, of a line's or a unit's: `count` of them, `left` from column `first` on,
// the rest `jump` columns further on.
struct OuterColumns {
    int first, left, jump, count;

    // Of those from `begin` on, before `end`.
    template <class P>
    static __device__ __forceinline__ OuterColumns of(const P& p, int begin, int end) {
        const int first = max(begin, p.edge_from), last = min(end, p.edge_to), right = max(first, p.w);
        const int left = max(0, min(last, 0) - first);
        return {first, left, right - first - left, left + max(0, last - right)};
    }
    __device__ __forceinline__ int at(int i) const { return first + i + (i < left ? 0 : jump); }
};

}  // namespace hc
