// Products of a warp with half of the k of those in mma.cuh: d[16][8] += a[16][k] * b[k][8] with fp32 sums.
#pragma once

#include "kernels/ptx/address.cuh"

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

#define HC_MMA_HALF_K(SHAPE, TYPES)                                         \
    asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPES            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])           \
                 : "r"(a[0]), "r"(a[1]), "r"(b))

// mma.sync m16n8k4, TF32 bits in 32-bit registers.
__device__ __forceinline__ void mma_m16n8k4_tf32(float (&d)[4], const u32 (&a)[2], u32 b) {
    HC_MMA_HALF_K("m16n8k4", "tf32.tf32");
}

// mma.sync m16n8k8, two fp16 in a register, the lower k in the low half.
__device__ __forceinline__ void mma_m16n8k8_fp16(float (&d)[4], const u32 (&a)[2], u32 b) {
    HC_MMA_HALF_K("m16n8k8", "f16.f16");
}

// mma.sync m16n8k8, two bf16 in a register, the lower k in the low half.
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], const u32 (&a)[2], u32 b) {
    HC_MMA_HALF_K("m16n8k8", "bf16.bf16");
}

#undef HC_MMA_HALF_K

}  // namespace hc::ptx
#endif
