// Named barriers and setmaxnreg: one warpgroup makes numbers, another sums them, in four rounds of one buffer. The
// bound of 512 threads leaves 128 registers at launch, so that 160 is an increase.
// in[0]: 4 * 128 words, out[0]: 4 * 128 words. 256 threads.
extern "C" __global__ void __launch_bounds__(512, 1) conformance(const __grid_constant__ Params p) {
    u32* const buffer = reinterpret_cast<u32*>(dynamic_smem);
    const int t = threadIdx.x % 128;
    if (threadIdx.x < 128) {
        setmaxnreg_dec<40>();
        for (int round = 0; round < 4; ++round) {
            bar_sync(2, 256);
            buffer[t] = p.in[0][round * 128 + t];
            bar_arrive(1, 256);
        }
    } else {
        setmaxnreg_inc<160>();
        bar_arrive(2, 256);
        for (int round = 0; round < 4; ++round) {
            bar_sync(1, 256);
            p.out[0][round * 128 + t] = buffer[t] + buffer[127 - t];
            bar_sync(3, 128);
            if (round < 3) bar_arrive(2, 256);
        }
    }
}
