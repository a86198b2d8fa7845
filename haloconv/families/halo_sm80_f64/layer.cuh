// The order in which channels and filters are staged and packed.
#pragma once

#include "kernels/geometry.cuh"

namespace hc {

constexpr int PLANE = 8;                        // channels of a plane, and filters of an eight
constexpr int CHUNK = PLANES * PLANE;           // channels of a step
constexpr int EIGHT_BYTES = PLANE * PLANE * 8;  // of the weights of a plane and an eight: a pair of each lane

struct alignas(16) Pair {
    double of[2];
};

}  // namespace hc
