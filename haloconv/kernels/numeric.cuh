// Element types of tensors and the type sums are kept in.
//
// The constant ELEM names one of the types below. 16-bit formats are carried as their bits, so that no CUDA header is
// needed; sums of fp32, fp16 and bf16 are kept in float, sums of fp64 in double.
#pragma once

#include "kernels/ptx/cvt.cuh"

namespace hc {

using i64 = long long;

struct fp16 {
    using acc_t = float;
    unsigned short bits;
};

struct bf16 {
    using acc_t = float;
    unsigned short bits;
};

// An fp32 word that tensor cores read as TF32: its low 13 bits count as zero.
struct tf32 {
    using acc_t = float;
    unsigned bits;
};

template <class T>
struct AccOf {
    using type = typename T::acc_t;
};
template <>
struct AccOf<float> {
    using type = float;
};
template <>
struct AccOf<double> {
    using type = double;
};

__device__ __forceinline__ float to_acc(float value) { return value; }
__device__ __forceinline__ double to_acc(double value) { return value; }
__device__ __forceinline__ float to_acc(fp16 value) { return ptx::cvt_f32_f16(value.bits); }
__device__ __forceinline__ float to_acc(bf16 value) { return __uint_as_float(unsigned(value.bits) << 16); }

template <class T>
__device__ __forceinline__ T from_acc(typename AccOf<T>::type value) {
    return value;
}
template <>
__device__ __forceinline__ fp16 from_acc<fp16>(float value) {
    return {ptx::cvt_rn_f16_f32(value)};
}
// Round to nearest even in integers: cvt.rn.bf16.f32 needs sm_80, and this runs once per output.
template <>
__device__ __forceinline__ bf16 from_acc<bf16>(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return {(unsigned short)((bits >> 16) | 0x0040u)};  // keep a NaN a NaN
    return {(unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Two neighbours as one word, `low` first in memory. From sm_80 on.
template <class Half>
__device__ __forceinline__ unsigned from_acc_pair(float low, float high) {
    return from_acc<Half>(low).bits | unsigned(from_acc<Half>(high).bits) << 16;
}
template <>
__device__ __forceinline__ unsigned from_acc_pair<fp16>(float low, float high) {
    return ptx::cvt_rn_f16x2_f32(high, low);
}
template <>
__device__ __forceinline__ unsigned from_acc_pair<bf16>(float low, float high) {
    return ptx::cvt_rn_bf16x2_f32(high, low);
}

// Four neighbours in memory, moved by one instruction (two for double).
template <class T>
struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) Pack4 {
    T lane[4];
};

}  // namespace hc
