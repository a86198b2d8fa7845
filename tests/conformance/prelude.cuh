// What the conformance kernels share: one block, one struct of arguments, waits that give up.
#include "kernels/numeric.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/mma_half_k.cuh"
#include "kernels/ptx/register.cuh"
#include "kernels/ptx/tensor_map.cuh"
#include "kernels/ptx/wgmma.cuh"

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
