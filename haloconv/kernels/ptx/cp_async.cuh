// Asynchronous copies of a thread, global to shared: 4, 8 or 16 bytes, both addresses multiples of that size. Only
// src_bytes (0 to the size) are read; the rest of the destination becomes zero.
#pragma once

#include "kernels/ptx/address.cuh"

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// cp.async.ca, 4 bytes.
__device__ __forceinline__ void cp_async_4(void* dst_smem, const void* src, u32 src_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(dst_smem)), "l"(src),
                 "r"(src_bytes)
                 : "memory");
}

// cp.async.ca, 8 bytes.
__device__ __forceinline__ void cp_async_8(void* dst_smem, const void* src, u32 src_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(dst_smem)), "l"(src),
                 "r"(src_bytes)
                 : "memory");
}

// cp.async.cg, 16 bytes: past the first-level cache.
__device__ __forceinline__ void cp_async_16(void* dst_smem, const void* src, u32 src_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst_smem)), "l"(src),
                 "r"(src_bytes)
                 : "memory");
}

// cp.async.commit_group: closes the thread's current group.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: at most the N youngest groups of the thread are still in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// cp.async.mbarrier.arrive.noinc: one of the barrier's expected arrivals, made when the thread's copies so far land.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u64* bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

}  // namespace hc::ptx
#endif
