// Rows of a thread's window, read from shared memory in vectors of four columns, 16 bytes.
//
// Constants: S, the filter's columns, and LEAD, the columns of the first vector that the filter does not meet.
#pragma once

namespace hc::tile {

constexpr int COLS = 4, VECTORS = (LEAD + COLS + S - 1 + 3) / 4;  // of a thread; of a row of its window

static_assert(LEAD < 4, "the first vector has a column that the filter meets");

struct alignas(16) Vector {
    float of[COLS];
};

using Row = Vector[VECTORS];

__device__ __forceinline__ void read(Row& row, const char* from) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) row[v] = reinterpret_cast<const Vector*>(from)[v];
}

// What column `col` of a thread meets at column `s` of the filter.
__device__ __forceinline__ float met(const Row& row, int col, int s) {
    return row[(LEAD + col + s) / 4].of[(LEAD + col + s) % 4];
}

}  // namespace hc::tile
