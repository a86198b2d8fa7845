// What stands outside the image where it is no zeros: other pixels of it, which a padding mode names for each axis.
//
// The constants EDGE_ROWS and EDGE_COLS are those modes. Without them all outside is zeros, HaloParams lacks two
// fields, and no source changes. A line is staged from the row that its own stands for. Loads find each pixel where it
// stands; where TMA brings rows of the image with zeros around them, the warp that transposes a unit overwrites these.
#pragma once

#ifdef EDGE_ROWS
#define EDGES 1
#else
#define EDGES 0
#endif

namespace hc {

#if EDGES
enum class Edge { ZEROS, CIRCULAR, REFLECT, REPLICATE };  // as torch.nn.functional.pad

// The place that stands at `at` of an axis of `extent` pixels. Outputs read none that is further outside than a mode
// allows; for one that they do not read it may be outside again.
template <Edge MODE>
__device__ __forceinline__ int at_edge(int at, int extent) {
    if constexpr (MODE == Edge::CIRCULAR) return at < 0 ? at + extent : at >= extent ? at - extent : at;
    if constexpr (MODE == Edge::REFLECT) return at < 0 ? -at : at >= extent ? 2 * (extent - 1) - at : at;
    if constexpr (MODE == Edge::REPLICATE) return min(max(at, 0), extent - 1);
    return at;
}
#endif

// The row, the column of the image that stands at that one.
template <class P>
__device__ __forceinline__ int edge_row(const P& p, int row) {
#if EDGES
    return at_edge<EDGE_ROWS>(row, p.h);
#endif
    return row;
}
template <class P>
__device__ __forceinline__ int edge_col(const P& p, int col) {
#if EDGES
    return at_edge<EDGE_COLS>(col, p.w);
#endif
    return col;
}

}  // namespace hc
