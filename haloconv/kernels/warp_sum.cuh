// The sum of a value over the lanes of a warp.
#pragma once

namespace hc {

// Every lane gets the same sum. All 32 lanes take part.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int far = 16; far > 0; far /= 2) value += __shfl_xor_sync(0xffffffffu, value, far);
    return value;
}

}  // namespace hc
