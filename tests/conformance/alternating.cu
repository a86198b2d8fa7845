// Two warps write the halves of a slot alternately, a third reads it and gives it back. Each waits for the others, so that
// nothing races; racecheck says otherwise, as it takes an arrival of a lane for that lane's alone (docs/notebook.md).
// in[0]: 8 * 64 words, out[0]: 8 * 64 words. 96 threads.
extern "C" __global__ void conformance(const __grid_constant__ Params p) {
    u32* const slot = reinterpret_cast<u32*>(dynamic_smem);
    u64* const full = reinterpret_cast<u64*>(slot + 64);
    u64* const empty = full + 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) mbarrier_init(full, 2), mbarrier_init(empty, 1), fence_mbarrier_init();
    __syncthreads();
    for (int round = 0; round < 8; ++round) {
        const bool writes = warp < 2;
        if (!wait(p, writes ? empty : full, writes ? ~round & 1 : round & 1)) return;
        if (writes) {
            const int at = (warp + round) % 2 * 32 + lane;
            slot[at] = p.in[0][round * 64 + at];
        } else {
            for (int at = lane; at < 64; at += 32) p.out[0][round * 64 + at] = slot[at];
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(writes ? full : empty);
    }
}
