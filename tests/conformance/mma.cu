// mma.sync: in[0]: a (4 registers a lane), in[1]: b (2), in[2]: d (4). scalars: type, how many products. Types 3 and 4
// are fp16 and bf16 with half the depth: half the registers of a and b. One warp.
extern "C" __global__ void __launch_bounds__(32) conformance(const __grid_constant__ Params p) {
    const int lane = threadIdx.x, halves = p.scalars[0] < 3 ? 2 : 1;
    for (int product = 0; product < p.scalars[1]; ++product) {
        u32 a[4], b[2];
        float d[4];
        for (int i = 0; i < 2 * halves; ++i) a[i] = p.in[0][(product * 2 * halves + i) * 32 + lane];
        for (int i = 0; i < halves; ++i) b[i] = p.in[1][(product * halves + i) * 32 + lane];
        for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(p.in[2][(product * 4 + i) * 32 + lane]);
        const u32 lower[2] = {a[0], a[1]};
        if (p.scalars[0] == 0)
            mma_m16n8k8_tf32(d, a, b);
        else if (p.scalars[0] == 1)
            mma_m16n8k16_fp16(d, a, b);
        else if (p.scalars[0] == 2)
            mma_m16n8k16_bf16(d, a, b);
        else if (p.scalars[0] == 3)
            mma_m16n8k8_fp16(d, lower, b[0]);
        else
            mma_m16n8k8_bf16(d, lower, b[0]);
        for (int i = 0; i < 4; ++i) p.out[0][(product * 4 + i) * 32 + lane] = __float_as_uint(d[i]);
    }
}
