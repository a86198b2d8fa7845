// Clusters: neighbouring blocks that run at a time, close together, and read one another's shared memory (sm_90).
#pragma once

#include "kernels/ptx/address.cuh"

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// The block's number in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// barrier.cluster: waits until every thread of the cluster that has not left is here; what each wrote before, all see.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// mapa: where block `rank` of the cluster has what this block has at `smem`.
template <class T>
__device__ __forceinline__ const T* peer_shared(const T* smem, u32 rank) {
    u64 to;
    asm("mapa.u64 %0, %1, %2;" : "=l"(to) : "l"(smem), "r"(rank));
    return reinterpret_cast<const T*>(to);
}

}  // namespace hc::ptx
#endif
