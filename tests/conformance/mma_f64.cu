#include "kernels/ptx/mma_f64.cuh"

// mma.sync in fp64: in[0]: a (k / 2 elements a lane), in[1]: b (k / 4), in[2]: d (4), room for the largest of each.
// scalars: k, how many products. Of k = 4 there are 8 rows: a has one element, d two. One warp.
extern "C" __global__ void __launch_bounds__(32) conformance(const __grid_constant__ Params p) {
    const int lane = threadIdx.x;
    for (int product = 0; product < p.scalars[1]; ++product) {
        double a[8], b[4], d[4];
        for (int i = 0; i < 8; ++i) a[i] = reinterpret_cast<const double*>(p.in[0])[(product * 8 + i) * 32 + lane];
        for (int i = 0; i < 4; ++i) b[i] = reinterpret_cast<const double*>(p.in[1])[(product * 4 + i) * 32 + lane];
        for (int i = 0; i < 4; ++i) d[i] = reinterpret_cast<const double*>(p.in[2])[(product * 4 + i) * 32 + lane];
        if (p.scalars[0] == 4) {
            double half[2] = {d[0], d[1]};
            mma_m8n8k4_f64(half, a[0], b[0]);
            d[0] = half[0], d[1] = half[1];
        } else if (p.scalars[0] == 8) {
            mma_m16n8k8_f64(d, {a[0], a[1], a[2], a[3]}, {b[0], b[1]});
        } else {
            mma_m16n8k16_f64(d, a, b);
        }
        for (int i = 0; i < 4; ++i) reinterpret_cast<double*>(p.out[0])[(product * 4 + i) * 32 + lane] = d[i];
    }
}
