// Division of small numbers by numbers that the host knows.
#pragma once

namespace hc {

// A Divisor (divisor.cuh) without its shift: exact while n * value stays below 2^32.
struct SmallDivisor {
    int value;
    unsigned magic;

    __device__ __forceinline__ int quotient(unsigned n) const { return value == 1 ? n : __umulhi(n, magic); }
};

}  // namespace hc
