// Named barriers of a block: ids 0 to 15 (0 is __syncthreads), thread counts in multiples of 32.
#pragma once

#include "ptx/address.cuh"

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// bar.sync: waits until `threads` threads have arrived at barrier `id`, this warp included.
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: arrives without waiting; `threads` counts those who wait too.
__device__ __forceinline__ void bar_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace hc::ptx
#endif
