// The layout of tiles in shared memory that tensor cores and TMA agree on.
#pragma once

namespace hc {

// Where the 16-byte unit `unit` of row `row` stands, in bytes, in rows of 32, 64 or 128 bytes from a multiple of 1024
// on: bits 4 to 6 of the address are exchanged by its bits 7 to 9, as many as a row has. So rows that follow each other
// hold the same unit in different banks, and unit u is at unit_offset(row, 0) ^ u << 4.
template <int ROW_BYTES>
__device__ __forceinline__ int unit_offset(int row, int unit) {
    static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "one of the swizzles");
    const int row_bytes = row * ROW_BYTES;
    return row_bytes ^ ((unit ^ (row_bytes >> 7 & (ROW_BYTES / 16 - 1))) << 4);
}

// Where fp32 sums leave by pixels: the row of a swizzled buffer, of eight, to which row `row` of eight rows of M goes.
// A store of 8 bytes a lane takes half a warp at a time, rows 0 to 3, then 4 to 7. Spread, each has banks of its own;
// rows 0 and 1 of a buffer share theirs.
__device__ __forceinline__ int spread_row(int row) { return row % 4 * 2 + row / 4; }

}  // namespace hc
