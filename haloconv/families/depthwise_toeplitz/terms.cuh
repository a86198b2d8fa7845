// fp32 as sums of two TF32 values: precision="tf32x3", which multiplies them three times.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

// An fp32 element whose products are those of its two terms, but that of both small ones.
struct tf32x3 {
    using acc_t = float;
    float value;
};

__device__ __forceinline__ float to_acc(tf32x3 element) { return element.value; }
template <>
__device__ __forceinline__ tf32x3 from_acc<tf32x3>(float value) {
    return {value};
}

}  // namespace hc

namespace hc::toeplitz {

// What mma.sync multiplies for elements of a type.
template <class Elem>
struct Multiplied {
    using type = Elem;
};
template <>
struct Multiplied<tf32x3> {
    using type = float;
};

template <class Elem>
__device__ __forceinline__ constexpr bool in_terms(Elem) {
    return false;
}
__device__ __forceinline__ constexpr bool in_terms(tf32x3) { return true; }

// What TF32 keeps of a value when it is cut, as tensor cores cut it.
__device__ __forceinline__ float large_term(float value) {
    return __uint_as_float(__float_as_uint(value) & 0xffffe000u);
}

// What it leaves, exactly.
__device__ __forceinline__ unsigned small_term(unsigned bits) {
    const float value = __uint_as_float(bits);
    return __float_as_uint(value - large_term(value));
}

}  // namespace hc::toeplitz
