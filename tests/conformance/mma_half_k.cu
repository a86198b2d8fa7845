// mma.sync with half of the k: in[0]: a (2 registers a lane), in[1]: b (1), in[2]: d (4). scalars: type, how many
// products. One warp.
extern "C" __global__ void __launch_bounds__(32) conformance(const __grid_constant__ Params p) {
    const int lane = threadIdx.x;
    for (int product = 0; product < p.scalars[1]; ++product) {
        u32 a[2];
        const u32 b = p.in[1][product * 32 + lane];
        float d[4];
        for (int i = 0; i < 2; ++i) a[i] = p.in[0][(product * 2 + i) * 32 + lane];
        for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(p.in[2][(product * 4 + i) * 32 + lane]);
        if (p.scalars[0] == 0)
            mma_m16n8k4_tf32(d, a, b);
        else if (p.scalars[0] == 1)
            mma_m16n8k8_fp16(d, a, b);
        else
            mma_m16n8k8_bf16(d, a, b);
        for (int i = 0; i < 4; ++i) p.out[0][(product * 4 + i) * 32 + lane] = __float_as_uint(d[i]);
    }
}
