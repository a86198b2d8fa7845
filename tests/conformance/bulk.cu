// mbarrier and bulk copies: three rounds of one buffer, in by bulk copy, plus one in registers, out by bulk copy.
// in[0]: rounds * bytes, out[0]: the same plus one. scalars: bytes of a round. 64 threads.
constexpr int ROUNDS = 3;

extern "C" __global__ void __launch_bounds__(64) conformance(const __grid_constant__ Params p) {
    const int bytes = p.scalars[0], words = bytes / 4;
    u64 *full = reinterpret_cast<u64*>(dynamic_smem), *empty = full + 1;
    u32* const buffer = reinterpret_cast<u32*>(dynamic_smem + 1024);
    u32* const staged = buffer + words;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 64);
        fence_mbarrier_init();
    }
    __syncthreads();
    for (int round = 0; round < ROUNDS; ++round) {
        if (threadIdx.x == 0) {
            if (!wait(p, empty, round & 1 ^ 1)) return;
            mbarrier_expect_tx(full, bytes / 2);
            cp_async_bulk_shared_global(buffer, p.in[0] + round * words, bytes, full);
            mbarrier_arrive_expect_tx(full, bytes - bytes / 2);
        }
        if (!(threadIdx.x < 32 ? wait(p, full, round & 1) : wait<false>(p, full, round & 1))) return;
        if (threadIdx.x == 0) cp_async_bulk_wait_group_read<0>();  // of the round before
        __syncthreads();
        for (int i = threadIdx.x; i < words; i += 64) staged[i] = buffer[i] + 1;
        mbarrier_arrive(empty);
        fence_proxy_async_shared();
        __syncthreads();
        if (threadIdx.x == 0) {
            cp_async_bulk_global_shared(p.out[0] + round * words, staged, bytes / 2);
            cp_async_bulk_commit_group();
            cp_async_bulk_global_shared(p.out[0] + round * words + words / 2, staged + words / 2, bytes / 2);
            cp_async_bulk_commit_group();
        }
    }
    if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();
    __syncthreads();
    if (threadIdx.x == 0) mbarrier_inval(full), mbarrier_inval(empty);
}
