// Named barriers of a block: ids 0 to 15 (0 is __syncthreads), thread counts in multiples of 32; and a warp's leader.
#pragma once

#include "kernels/ptx/address.cuh"

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

// elect.sync: true in one lane of the warp, the same one each time. The whole warp calls it. Where it guards copies by
// TMA, the compiler knows that one lane asks for them.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile(
        "{\n.reg .pred elected;\n"
        "elect.sync _|elected, 0xffffffff;\n"
        "selp.b32 %0, 1, 0, elected;\n}"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace hc::ptx
#endif
