// Conversions between 16-bit floating-point bits and float: one wrapper, one instruction.
#pragma once

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

}  // namespace hc::ptx
