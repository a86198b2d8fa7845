// Rings of shared-memory buffers guarded by mbarriers: positions, waiting, arriving.
#pragma once

#include "kernels/ptx/mbarrier.cuh"

namespace hc {

// A position in a ring of `count` buffers and the parity of the round.
struct Cursor {
    int index = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance(int count) {
        if (++index == count) index = 0, parity ^= 1;
    }
};

// Waits until the phase of that parity has ended. A fresh barrier counts as one whose phase of parity 1 has ended.
__device__ __forceinline__ void wait(ptx::u64* barrier, unsigned parity) {
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {}
}

// One arrival for the whole warp, after what all its lanes did before.
__device__ __forceinline__ void arrive_warp(ptx::u64* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

}  // namespace hc
