// elect.sync: how many lanes are elected, and whether a second call elects the same one after lanes went different ways.
// in[0]: 32 words, out[0]: 2 * 32 words. 32 threads.
extern "C" __global__ void __launch_bounds__(32) conformance(const __grid_constant__ Params p) {
    const int lane = threadIdx.x;
    const bool elected = elect_sync();
    p.out[0][lane] = __popc(__ballot_sync(~0u, elected));
    if (p.in[0][lane] & 1) p.out[0][32 + lane] = 0;
    __syncwarp();
    p.out[0][32 + lane] = __all_sync(~0u, elect_sync() == elected);
}
