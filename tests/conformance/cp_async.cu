// cp.async of 4, 8 and 16 bytes with zero fill, waited for by group or by barrier. in[0]: data, in[1]: bytes to read of
// each copy; scalars: 1 for the barrier. 64 threads; thread t copies its own 16 bytes three times.
template <class Wait>
__device__ __forceinline__ void copy_all(const Params& p, unsigned char* smem, Wait wait_for_copies) {
    const int t = threadIdx.x;
    const unsigned char* from = reinterpret_cast<const unsigned char*>(p.in[0]) + 16 * t;
    unsigned char* to = smem + 16 * t;
    for (int i = 0; i < 4; ++i) cp_async_4(to + 4 * i, from + 4 * i, p.in[1][t * 7 + i]);
    cp_async_commit_group();
    for (int i = 0; i < 2; ++i) cp_async_8(to + 1024 + 8 * i, from + 8 * i, p.in[1][t * 7 + 4 + i]);
    cp_async_16(to + 2048, from, p.in[1][t * 7 + 6]);
    cp_async_commit_group();
    wait_for_copies();
}

extern "C" __global__ void __launch_bounds__(64) conformance(const __grid_constant__ Params p) {
    unsigned char* const smem = dynamic_smem + 1024;
    u64* const bar = reinterpret_cast<u64*>(dynamic_smem);
    if (threadIdx.x == 0) mbarrier_init(bar, 64);
    __syncthreads();
    if (p.scalars[0]) {
        copy_all(p, smem, [&] { cp_async_mbarrier_arrive_noinc(bar); });
        if (!wait(p, bar, 0)) return;
    } else {
        copy_all(p, smem, [&] {
            cp_async_wait_group<1>();
            p.out[1][threadIdx.x] = reinterpret_cast<u32*>(smem)[4 * threadIdx.x];  // the first group is there
            cp_async_wait_group<0>();
        });
        __syncthreads();
    }
    dump_shared(p.out[0], reinterpret_cast<u32*>(smem), 768);
    if (p.scalars[0]) p.out[1][threadIdx.x] = reinterpret_cast<u32*>(smem)[4 * threadIdx.x];
}
