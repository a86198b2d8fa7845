// What tensor cores and FMA units of a GPU reach with operands that are there already: the rates of haloconv/roofline.py.
//
//   wgmma_rate   m64n256 of TYPE (hc::tf32, hc::bf16), both operands in shared memory, two warpgroups a multiprocessor
//   f64_rate     m16n8k16 in fp64, operands in registers, four warps a scheduler
//   fma_rate     fp32, eight independent sums a thread
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/mma_f64.cuh"
#include "kernels/ptx/wgmma.cuh"

constexpr int WORDS = 320 * 32;  // 64 rows of a and 256 of b, 128 bytes each
constexpr int SUMS = 8;          // independent ones of a warp or a thread

struct Params {
    const unsigned* values;  // WORDS of them, finite as TYPE and as floats
    float* out;              // a float a thread: so that nothing is left out
    int rounds;
};

extern "C" __global__ void __launch_bounds__(256, 1) wgmma_rate(const __grid_constant__ Params p) {
    using namespace hc::ptx;
    using u64 = unsigned long long;
    __shared__ __align__(1024) unsigned image[WORDS];
    for (int i = threadIdx.x; i < WORDS; i += 256) image[i] = p.values[i];
    fence_proxy_async_shared();
    __syncthreads();
    const u64 a = smem_descriptor(shared_address(image), 0, 1024, 128);
    const u64 b = smem_descriptor(shared_address(image + 64 * 32), 0, 1024, 128);
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0;
    for (int round = 0; round < p.rounds; ++round) {
        wgmma_hold(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 16; ++step)
            wgmma_ss<TYPE, 256>(d, moved(a, 2 * (step % 4)), moved(b, 2 * (step % 4)), round | step);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_hold(d);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 128; ++i) sum += d[i];
    p.out[blockIdx.x * 256 + threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(512, 1) f64_rate(const __grid_constant__ Params p) {
    double a[8], b[4], d[SUMS][4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = __uint_as_float(p.values[threadIdx.x * 8 + i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = __uint_as_float(p.values[threadIdx.x * 4 + i]);
    for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) hc::ptx::mma_m16n8k16_f64(d[i], a, b);
    }
    double sum = 0;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    p.out[blockIdx.x * 512 + threadIdx.x] = (float)sum;
}

extern "C" __global__ void __launch_bounds__(1024, 1) fma_rate(const __grid_constant__ Params p) {
    const float a = __uint_as_float(p.values[threadIdx.x]), b = __uint_as_float(p.values[threadIdx.x + 1024]);
    float d[SUMS] = {};
    for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
        for (int i = 0; i < 8 * SUMS; ++i) d[i % SUMS] = fmaf(d[i % SUMS], a, b);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum += d[i];
    p.out[blockIdx.x * 1024 + threadIdx.x] = sum;
}
