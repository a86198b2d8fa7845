// What the conformance kernels share: one block, one struct of arguments, waits that give up.
#include "numeric.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/mma_half_k.cuh"
#include "ptx/register.cuh"
#include "ptx/tensor_map.cuh"
#include "ptx/wgmma.cuh"

using namespace hc::ptx;

struct Params {
    hc::TensorMap maps[2];
    const u32* in[4];
    u32* out[2];
    u32* gave_up;  // set by a wait that would not end
    int scalars[16];
};

extern __shared__ __align__(1024) unsigned char dynamic_smem[];

constexpr int PATIENCE = 4000;  // polls of a barrier; a copy here takes a few microseconds

template <bool SUSPENDS = true>
__device__ __forceinline__ bool wait(const Params& p, u64* bar, u32 parity) {
    for (int i = 0; i < PATIENCE; ++i)
        if (SUSPENDS ? mbarrier_try_wait_parity(bar, parity) : mbarrier_test_wait_parity(bar, parity)) return true;
    *p.gave_up = 1;
    return false;
}

// Words from global to shared memory and back, by all threads of the block.
__device__ __forceinline__ void fill_shared(u32* to, const u32* from, int words) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}
__device__ __forceinline__ void dump_shared(u32* to, const u32* from, int words) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}
