// The products of mma.sync under one name, by the type that is multiplied: float stands for TF32.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/mma_half_k.cuh"

namespace hc {

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], float) {
    ptx::mma_m16n8k8_tf32(d, a, b);
}
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], fp16) {
    ptx::mma_m16n8k16_fp16(d, a, b);
}
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bf16) {
    ptx::mma_m16n8k16_bf16(d, a, b);
}

// mma with half of the k.
__device__ __forceinline__ void mma_half(float (&d)[4], const unsigned (&a)[2], unsigned b, float) {
    ptx::mma_m16n8k4_tf32(d, a, b);
}
__device__ __forceinline__ void mma_half(float (&d)[4], const unsigned (&a)[2], unsigned b, fp16) {
    ptx::mma_m16n8k8_fp16(d, a, b);
}
__device__ __forceinline__ void mma_half(float (&d)[4], const unsigned (&a)[2], unsigned b, bf16) {
    ptx::mma_m16n8k8_bf16(d, a, b);
}

}  // namespace hc
