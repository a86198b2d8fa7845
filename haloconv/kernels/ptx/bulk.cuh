// Bulk copies of contiguous bytes by TMA. Addresses and sizes are multiples of 16 bytes.
#pragma once

#include "kernels/ptx/address.cuh"

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// cp.async.bulk, global to shared: completes `bytes` on the barrier. One thread issues it.
__device__ __forceinline__ void cp_async_bulk_shared_global(void* dst_smem, const void* src, u32 bytes, u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(dst_smem)),
                 "l"(src), "r"(bytes), "r"(shared_address(bar))
                 : "memory");
}

// cp.async.bulk, shared to global: belongs to the thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_global_shared(void* dst, const void* src_smem, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                 "r"(shared_address(src_smem)), "r"(bytes)
                 : "memory");
}

// cp.async.bulk.commit_group: closes the thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group: at most the N youngest bulk groups of the thread are still unfinished.
template <int N>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// cp.async.bulk.wait_group.read: at most the N youngest bulk groups still have to read shared memory.
template <int N>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

}  // namespace hc::ptx
#endif
