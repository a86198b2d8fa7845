// Divisions by numbers that the host knows.
#pragma once

namespace hc {

// For 0 <= n < 2^31 the quotient is the high word of n * magic, shifted.
// Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divisor {
    int value;
    unsigned magic;
    int shift;

    __device__ __forceinline__ int quotient(unsigned n) const { return value == 1 ? n : __umulhi(n, magic) >> shift; }
};

}  // namespace hc
