// The quotient of two counts, rounded up.
#pragma once

namespace hc {

// 0 where a is not positive and above -b.
__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace hc
