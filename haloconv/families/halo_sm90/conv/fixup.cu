// halo_sm90_fixup: the nonfinite fix-up. Outputs that are not finite are summed once more.
//
// Outputs of an output pack, and of residue classes with fewer taps than others, meet pixels outside their own filter
// with weight zero, and zero times an infinity or a NaN is a NaN. halo_sm90 notes whether any of its sums was not
// finite; if none was, this kernel ends at once. Else it sums each output that is not finite over its own taps alone,
// in fp32 from the tensors as they are. That is slow, and only tensors with such values pay. One thread an output, a
// grid's stride apart.
#include "kernels/activation.cuh"
#include "kernels/numeric.cuh"
#ifdef EDGE_ROWS
#include "families/halo_sm90/edges.cuh"
#endif

// Constants: ELEM is float, hc::fp16 or hc::bf16; AFFINE (or AFFINE_AND_RESIDUAL) and ACTIVATION: what becomes of a sum
// (activation.cuh); CLASSES where the outputs are those of all residue classes of a strided dgrad; EDGE_ROWS and
// EDGE_COLS where other pixels of the image stand outside it (edges.cuh).
using hc::i64;
using elem_t = ELEM;
using bias_t = hc::BiasOf<elem_t, AFFINE>::type;

constexpr int THREADS = 256;

static_assert(sizeof(elem_t) <= sizeof(float), "sums are fp32, which holds every element");

// Scalars as in halo_sm90's form: output pixel i gathers input pixel i * stride + j * dil - pad at tap j.
struct Params {
    const elem_t *x, *w;
    elem_t* y;
    const bias_t* bias;
    const unsigned* not_finite;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as y
#endif
    i64 x_n, x_c, x_h, x_w;                      // strides in elements
    i64 w_filter, w_channel, w_r, w_s, w_group;  // likewise
    i64 y_n, y_k, y_row, y_col, y_first;         // likewise; y_first is where the launch begins
    i64 outputs;                                 // of all images and filters
    int h, w_extent, channels, filters, groups;
    int rows, cols, pad_top, pad_left, stride_h, stride_w, dil_h, dil_w;
    int taps_r, first_r, step_r, taps_s, first_s, step_s;
#ifdef CLASSES
    int step_h, before_h, step_w, before_w;            // output pixel of place i: i * step + class - before
    int count_r, filter_dil_r, count_s, filter_dil_s;  // taps of the filter; filter_dil of them apart
#endif
};

struct Output {
    int n, filter, row, col;  // filter counts all groups
};

__device__ __forceinline__ Output output_at(const Params& p, i64 index) {
    Output at;
    at.col = int(index % p.cols), index /= p.cols;
    at.row = int(index % p.rows), index /= p.rows;
    const int filters = p.filters * p.groups;
    at.filter = int(index % filters), at.n = int(index / filters);
    return at;
}

#ifdef CLASSES
// Whether a class has a tap, which then is tap index / dil of the filter.
__device__ __forceinline__ bool has_tap(int index, int dil, int count) {
    return index >= 0 && index % dil == 0 && index / dil < count;
}
#endif

// The output whose place in memory, and the residual's, is `place`.
template <class P>
__device__ __forceinline__ float value_of(const P& p, Output at, i64 place) {
    const int group = at.filter / p.filters;
    const elem_t* x = p.x + at.n * p.x_n + (i64)group * p.channels * p.x_c;
    const elem_t* w = p.w + group * p.w_group + (at.filter - group * p.filters) * p.w_filter;
#ifdef CLASSES
    const int class_h = (at.row + p.before_h) % p.step_h, class_w = (at.col + p.before_w) % p.step_w;
    at.row = (at.row + p.before_h) / p.step_h, at.col = (at.col + p.before_w) / p.step_w;  // the place
#endif
    float sum = 0.f;
    for (int r = 0; r < p.taps_r; ++r)
        for (int s = 0; s < p.taps_s; ++s) {
            int h = at.row * p.stride_h + r * p.dil_h - p.pad_top;
            int col = at.col * p.stride_w + s * p.dil_w - p.pad_left;
#ifdef EDGE_ROWS
            h = hc::at_edge<hc::ROW_EDGE>(h, p.h), col = hc::at_edge<hc::COL_EDGE>(col, p.w_extent);
#endif
            if ((unsigned)h >= (unsigned)p.h || (unsigned)col >= (unsigned)p.w_extent) continue;
            const elem_t* pixel = x + h * p.x_h + col * p.x_w;
#ifdef CLASSES
            const int index_r = class_h + p.first_r + r * p.step_r, index_s = class_w + p.first_s + s * p.step_s;
            if (!has_tap(index_r, p.filter_dil_r, p.count_r) || !has_tap(index_s, p.filter_dil_s, p.count_s)) continue;
            const elem_t* tap = w + index_r / p.filter_dil_r * p.w_r + index_s / p.filter_dil_s * p.w_s;
#else
            const elem_t* tap = w + (p.first_r + r * p.step_r) * p.w_r + (p.first_s + s * p.step_s) * p.w_s;
#endif
            for (int c = 0; c < p.channels; ++c) sum += hc::to_acc(pixel[c * p.x_c]) * hc::to_acc(tap[c * p.w_channel]);
        }
    hc::BiasAndScale own{};
    if constexpr (AFFINE != hc::Affine::NONE) own = hc::bias_and_scale(p.bias[at.filter]);
    if constexpr (RESIDUAL)
        return hc::finished<AFFINE, ACTIVATION>(sum, own, hc::to_acc(p.residual[place]));
    else
        return hc::finished<AFFINE, ACTIVATION>(sum, own);
}

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm90_fixup(const __grid_constant__ Params p) {
    if (*p.not_finite == 0) return;
    for (i64 index = (i64)blockIdx.x * THREADS + threadIdx.x; index < p.outputs; index += (i64)gridDim.x * THREADS) {
        const Output at = output_at(p, index);
        const i64 place = p.y_first + at.n * p.y_n + at.filter * p.y_k + at.row * p.y_row + at.col * p.y_col;
        if (hc::to_acc(p.y[place]) * 0.f != 0.f) p.y[place] = hc::from_acc<elem_t>(value_of(p, at, place));
    }
}
