// The order in which channels and filters are staged and packed.
#pragma once

#include "kernels/geometry.cuh"

namespace hc {

constexpr int OCTET = 8;                        // channels of an octet, and filters of an eight
constexpr int CHUNK = OCTETS * OCTET;           // channels of a step
constexpr int EIGHT_BYTES = OCTET * OCTET * 8;  // of the weights of an octet and an eight: a pair of each lane

struct alignas(16) Pair {
    double of[2];
};

}  // namespace hc
