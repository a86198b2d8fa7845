// wgmma: rounds of a few instructions on one image of shared memory. Constants: TYPE; MODE 0 both operands in shared
// memory and K-major, 1 one or both MN-major, 2 a in registers. scalars: words of the image, n, rounds, instructions of a
// round, a is MN-major, b is MN-major. in[0]: image; in[1]: descriptors (a, b) relative to it; in[2]: d; in[3]: a.
template <int N, bool A_MN_MAJOR, bool B_MN_MAJOR>
__device__ __forceinline__ void multiply(const Params& p, u64 base) {
    const int t = threadIdx.x, instructions = p.scalars[3];
    for (int round = 0; round < p.scalars[2]; ++round) {
        float d[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) d[i] = __uint_as_float(p.in[2][(round * 128 + t) * (N / 2) + i]);
        wgmma_hold(d);
        for (int step = 0; step < instructions; ++step) {
            const int index = round * instructions + step;
            const u32* words = p.in[1] + index * 4;
            const u64 desc_a = ((u64)words[1] << 32 | words[0]) + base,
                      desc_b = ((u64)words[3] << 32 | words[2]) + base;
            const bool accumulate = p.scalars[6] || step;
            if constexpr (MODE == 2) {
                u32 a[4];
                for (int i = 0; i < 4; ++i) a[i] = p.in[3][(index * 4 + i) * 128 + t];
                wgmma_fence();
                wgmma_rs<TYPE, N, B_MN_MAJOR>(d, a, desc_b, accumulate);
                wgmma_commit_group();
                wgmma_wait_group<0>();
                wgmma_hold(d);
            } else {
                if (step == 0) wgmma_fence();
                wgmma_ss<TYPE, N, A_MN_MAJOR, B_MN_MAJOR>(d, desc_a, desc_b, accumulate);
            }
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_hold(d);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) p.out[0][(round * 128 + t) * (N / 2) + i] = __float_as_uint(d[i]);
    }
}

template <int N>
__device__ __forceinline__ void multiply_n(const Params& p, u64 base) {
    if constexpr (MODE == 1) {
        if (p.scalars[4] && p.scalars[5])
            multiply<N, true, true>(p, base);
        else if (p.scalars[4])
            multiply<N, true, false>(p, base);
        else
            multiply<N, false, true>(p, base);
    } else {
        multiply<N, false, false>(p, base);
    }
}

extern "C" __global__ void __launch_bounds__(128, 1) conformance(const __grid_constant__ Params p) {
    fill_shared(reinterpret_cast<u32*>(dynamic_smem), p.in[0], p.scalars[0]);
    fence_proxy_async_shared();
    __syncthreads();
    const u64 base = shared_address(dynamic_smem) >> 4;
    const int n = p.scalars[1];
    if constexpr (MODE == 1) {
        if (n == 8)
            multiply_n<8>(p, base);
        else if (n == 64)
            multiply_n<64>(p, base);
        else if (n == 80)
            multiply_n<80>(p, base);
        else
            multiply_n<256>(p, base);
    } else {
        if (n == 8)
            multiply_n<8>(p, base);
        else if (n == 16)
            multiply_n<16>(p, base);
        else if (n == 32)
            multiply_n<32>(p, base);
        else if (n == 56)
            multiply_n<56>(p, base);
        else if (n == 64)
            multiply_n<64>(p, base);
        else if (n == 80)
            multiply_n<80>(p, base);
        else if (n == 96)
            multiply_n<96>(p, base);
        else if (n == 112)
            multiply_n<112>(p, base);
        else if (n == 128)
            multiply_n<128>(p, base);
        else if (n == 160)
            multiply_n<160>(p, base);
        else if (n == 192)
            multiply_n<192>(p, base);
        else if (n == 224)
            multiply_n<224>(p, base);
        else
            multiply_n<256>(p, base);
    }
}
