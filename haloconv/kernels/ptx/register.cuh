// Moving registers between the warpgroups of a block. Counts are registers per thread: multiples of 8 from 24 to 256.
#pragma once

namespace hc::ptx {

// No instruction: the compiler must take the value for a new one, and so cannot compute what depends on it earlier.
__device__ __forceinline__ void renew(int& value) {
#ifndef HALOCONV_EMULATOR
    asm volatile("" : "+r"(value));
#endif
}

// renew for a float.
__device__ __forceinline__ void renew(float& value) {
#ifndef HALOCONV_EMULATOR
    asm volatile("" : "+f"(value));
#endif
}

}  // namespace hc::ptx

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// setmaxnreg.inc: waits until the block's pool has registers, then owns N. All warps of the warpgroup call it.
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N) : "memory");
}

// setmaxnreg.dec: keeps N and gives the others to the block's pool. All warps of the warpgroup call it.
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N) : "memory");
}

}  // namespace hc::ptx
#endif
