// Conversions between 16-bit floating-point bits, TF32 bits and float: one wrapper, one instruction.
#pragma once

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// cvt.f32.f16: exact.
__device__ __forceinline__ float cvt_f32_f16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// cvt.rn.f16.f32: round to nearest even; overflow becomes infinity.
__device__ __forceinline__ unsigned short cvt_rn_f16_f32(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// cvt.rn.f16x2.f32: the same for two, `low` in the low half of the word. From sm_80 on.
__device__ __forceinline__ unsigned cvt_rn_f16x2_f32(float high, float low) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// cvt.rn.bf16x2.f32: two floats to bf16, round to nearest even; a NaN becomes 0x7fff. From sm_80 on.
__device__ __forceinline__ unsigned cvt_rn_bf16x2_f32(float high, float low) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// cvt.rna.tf32.f32: round to nearest, halves away from zero, as the bits of a float whose low 13 bits are zero. These
// bits are cut from a NaN as well: one with all of its payload there (0x7f800001 to 0x7f801fff) becomes an infinity.
__device__ __forceinline__ unsigned cvt_rna_tf32(float value) {
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
}

}  // namespace hc::ptx
#endif
