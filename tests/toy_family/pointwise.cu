// toy/pointwise: y = w x + b of filters of one pixel, stride 1, without padding or groups; fp32, any strides.
//
// A thread sums one output over the channels. Shared memory: none. Registers: no tile.
#include "kernels/numeric.cuh"

// Constants: ELEM is float.
//   THREADS    threads of a block
using i64 = long long;
using elem_t = ELEM;
static_assert(THREADS % 32 == 0, "a block is a whole number of warps");

struct Params {
    const elem_t* x;
    const elem_t* w;
    const elem_t* b;  // may be null
    elem_t* y;
    i64 x_n, x_c, x_h, x_w, w_k, w_c;  // strides in elements
    i64 y_n, y_k, y_p, y_q;
    i64 outputs;
    int k, p, q, c;
};

extern "C" __global__ void __launch_bounds__(THREADS) toy_pointwise(const Params p) {
    const i64 output = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (output >= p.outputs) return;
    const i64 col = output % p.q, row = output / p.q % p.p, filter = output / p.q / p.p % p.k;
    const i64 image = output / p.q / p.p / p.k;
    const elem_t* x = p.x + image * p.x_n + row * p.x_h + col * p.x_w;
    float sum = p.b == nullptr ? 0.0f : p.b[filter];
    for (int c = 0; c < p.c; ++c) sum += x[c * p.x_c] * p.w[filter * p.w_k + c * p.w_c];
    p.y[image * p.y_n + filter * p.y_k + row * p.y_p + col * p.y_q] = sum;
}
