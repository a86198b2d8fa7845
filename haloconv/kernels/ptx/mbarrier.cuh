// mbarrier: a barrier in shared memory that counts arrivals and bytes still to come; its phases alternate in parity.
#pragma once

#include "kernels/ptx/address.cuh"

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// mbarrier.init: a phase ends after `arrivals` arrivals. One thread calls it, before any other use.
__device__ __forceinline__ void mbarrier_init(u64* bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes initialised barriers visible to the asynchronous proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive: one arrival, with release semantics in the block.
__device__ __forceinline__ void mbarrier_arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// mbarrier.arrive.expect_tx: the phase also waits for `bytes` more; then one arrival.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
                 : "memory");
}

// mbarrier.expect_tx: the phase also waits for `bytes` more; no arrival.
__device__ __forceinline__ void mbarrier_expect_tx(u64* bar, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
                 : "memory");
}

// mbarrier.try_wait.parity: true once the phase of that parity (0 or 1) has ended; acquire semantics in the block. May
// suspend the thread for a while and may return false, so call it in a loop.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* bar, u32 parity) {
    u32 ended;
    asm volatile(
        "{\n.reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.b32 %0, 1, 0, ended;\n}"
        : "=r"(ended)
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
    return ended != 0;
}

// mbarrier.test_wait.parity: the same, and never suspends the thread.
__device__ __forceinline__ bool mbarrier_test_wait_parity(u64* bar, u32 parity) {
    u32 ended;
    asm volatile(
        "{\n.reg .pred ended;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.b32 %0, 1, 0, ended;\n}"
        : "=r"(ended)
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
    return ended != 0;
}

// mbarrier.inval: the barrier's memory may be used for other things.
__device__ __forceinline__ void mbarrier_inval(u64* bar) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

}  // namespace hc::ptx
#endif
