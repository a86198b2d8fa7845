// Tensor-core products of a warp: d[16][8] += a[16][k] * b[k][8] with fp32 sums, operands in registers.
#pragma once

#include "kernels/ptx/address.cuh"

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

#define HC_MMA(SHAPE, TYPES)                                                            \
    asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPES                        \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// mma.sync m16n8k8, TF32 bits in 32-bit registers.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    HC_MMA("m16n8k8", "tf32.tf32");
}

// mma.sync m16n8k16, two fp16 in a register, the lower k in the low half.
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    HC_MMA("m16n8k16", "f16.f16");
}

// mma.sync m16n8k16, two bf16 in a register, the lower k in the low half.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    HC_MMA("m16n8k16", "bf16.bf16");
}

#undef HC_MMA

}  // namespace hc::ptx
#endif
