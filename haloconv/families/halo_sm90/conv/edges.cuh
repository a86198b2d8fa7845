// What stands outside the image where it is no zeros: other pixels of it, which a padding mode names for each axis.
//
// The constants EDGE_ROWS and EDGE_COLS are those modes. Without them all outside is zeros, and HaloParams lacks two
// fields. A line is staged from the row that its own stands for. Loads find each pixel where it stands; where TMA
// brings rows of the image with zeros around them, the warp that transposes a unit overwrites these.
#pragma once

namespace hc {

enum class Edge { ZEROS, CIRCULAR, REFLECT, REPLICATE };  // as torch.nn.functional.pad

#ifdef EDGE_ROWS
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

}  // namespace hc
