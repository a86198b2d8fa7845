// Divisions whose divisors the host knows.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

// Division by a number that the host knows: for 0 <= n < 2^31 the quotient is the high word of n * magic, shifted.
// Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divisor {
    int value;
    unsigned magic;
    int shift;

    __device__ __forceinline__ int quotient(unsigned n) const { return value == 1 ? n : __umulhi(n, magic) >> shift; }
};

// A length cut into equal parts, as far as whole numbers allow: part i begins at i * length / parts, rounded down.
struct Cuts {
    Divisor parts;
    int each, left;  // length = each * parts + left

    __device__ __forceinline__ int begin(int i) const { return i * each + parts.quotient(i * left); }
    __device__ __forceinline__ int end() const { return parts.value * each + left; }
};

}  // namespace hc
