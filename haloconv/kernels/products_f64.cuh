// Products of 16 rows and 8 columns in fp64 under one name, by their k: one instruction from compute capability 9.0 on,
// and m8n8k4 where there is no other.
//
// Lane l has rows l / 4 and l / 4 + 8 of a (elements 2 i and 2 i + 1) and column l / 4 of b (element i), both at
// k = l % 4 + 4 i; of d the columns 2 (l % 4) and the next one, of the first row, then of the second.
#pragma once

#include "kernels/ptx/mma_f64.cuh"

namespace hc {

template <int K>
__device__ __forceinline__ void mma_f64(double (&d)[4], const double (&a)[K / 2], const double (&b)[K / 4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    double upper[2] = {d[0], d[1]}, lower[2] = {d[2], d[3]};
#pragma unroll
    for (int i = 0; i < K / 4; ++i) {
        ptx::mma_m8n8k4_f64(upper, a[2 * i], b[i]);
        ptx::mma_m8n8k4_f64(lower, a[2 * i + 1], b[i]);
    }
    d[0] = upper[0], d[1] = upper[1], d[2] = lower[0], d[3] = lower[1];
#else
    if constexpr (K == 8)
        ptx::mma_m16n8k8_f64(d, a, b);
    else
        ptx::mma_m16n8k16_f64(d, a, b);
#endif
}

}  // namespace hc
