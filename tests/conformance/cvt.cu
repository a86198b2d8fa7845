// cvt: every conversion on a list of bit patterns. scalars: operation, count.
extern "C" __global__ void __launch_bounds__(128) conformance(const __grid_constant__ Params p) {
    const int operation = p.scalars[0], count = p.scalars[1];
    for (int i = threadIdx.x; i < count; i += 128) {
        const u32 bits = p.in[0][i];
        u32 result;
        if (operation == 0)
            result = cvt_rn_f16_f32(__uint_as_float(bits));
        else if (operation == 1)
            result = cvt_rna_tf32(__uint_as_float(bits));
        else if (operation == 3)
            result = cvt_rn_f16x2_f32(__uint_as_float(p.in[0][count - 1 - i]), __uint_as_float(bits));
        else if (operation == 4)
            result = cvt_rn_bf16x2_f32(__uint_as_float(p.in[0][count - 1 - i]), __uint_as_float(bits));
        else
            result = __float_as_uint(cvt_f32_f16((unsigned short)bits));
        p.out[0][i] = result;
    }
}
