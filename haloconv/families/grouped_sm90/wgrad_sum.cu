// halo_sm80_wgrad_march_sum: dw from the partial sums of halo_sm80_wgrad_march, in the order of the parts.
//
// A block has 32 neighbouring sums, those of the lanes of one warp, and PART_WARPS warps that share the parts, so that
// their loads are under way at once.
#include "kernels/numeric.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others integers.
//   R S ATOMS N_TILES    as in halo_sm80_wgrad_march
//   PART_WARPS           warps of a block
using hc::i64;
using elem_t = ELEM;

constexpr int PAIRS = (S * ATOMS + 1) / 2, WARP_SUMS = R * PAIRS * N_TILES * 4, WARPS_N = ATOMS / N_TILES;
constexpr int CONSUMERS = 8 / ATOMS * WARPS_N;

struct Params {
    elem_t* dw;
    const float* partials;       // [part][slab][consumer][sum of a lane][lane]
    i64 dw_k, dw_c, dw_r, dw_s;  // strides in elements
    int groups, slabs, parts;
};

extern "C" __global__ void __launch_bounds__(32 * PART_WARPS) halo_sm80_wgrad_march_sum(const Params p) {
    __shared__ float sums[PART_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.x % WARP_SUMS;
    const int consumer = blockIdx.x / WARP_SUMS;  // of all slabs
    const i64 part_elems = (i64)p.slabs * CONSUMERS * WARP_SUMS * 32;
    const float* const from = p.partials + (i64)blockIdx.x * 32 + lane;
    float sum = 0;
#pragma unroll 8
    for (int part = warp; part < p.parts; part += PART_WARPS) sum += from[part * part_elems];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int other = 1; other < PART_WARPS; ++other) sum += sums[other][lane];
    const int e = i % 4, n = i / 4 % N_TILES, pair = i / 4 / N_TILES % PAIRS, r = i / 4 / N_TILES / PAIRS;
    const int group = consumer / WARPS_N, atom = 2 * pair + e / 2;
    if (group >= p.groups || atom >= S * ATOMS) return;
    const int filter = ((consumer % WARPS_N) * N_TILES + n) * 8 + lane % 4 * 2 + e % 2;
    const int channel = atom % ATOMS * 8 + lane / 4, s = atom / ATOMS;
    p.dw[(group * (ATOMS * 8) + filter) * p.dw_k + channel * p.dw_c + r * p.dw_r + s * p.dw_s] =
        hc::from_acc<elem_t>(sum);
}
