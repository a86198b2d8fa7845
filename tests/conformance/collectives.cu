// Shuffles of every kind and width, and votes. in[0]: a value, in[1]: a lane or distance, of each thread. One warp.
extern "C" __global__ void __launch_bounds__(32) conformance(const __grid_constant__ Params p) {
    const int lane = threadIdx.x;
    const u32 value = p.in[0][lane], all = 0xffffffffu;
    const int other = p.in[1][lane], distance = p.in[1][32];
    u32* out = p.out[0] + lane;
    for (int width = 8; width <= 32; width *= 2, out += 4 * 32) {
        out[0 * 32] = __shfl_sync(all, value, other, width);
        out[1 * 32] = __shfl_up_sync(all, value, distance, width);
        out[2 * 32] = __shfl_down_sync(all, value, distance, width);
        out[3 * 32] = __shfl_xor_sync(all, value, distance, width);
    }
    out[0 * 32] = __ballot_sync(all, value & 1);
    out[1 * 32] = __all_sync(all, (value & 1) || lane == 5) != 0;
    out[2 * 32] = __any_sync(all, lane == distance) != 0;
    out[3 * 32] = __float_as_uint(__shfl_xor_sync(all, __uint_as_float(value), 1));
}
