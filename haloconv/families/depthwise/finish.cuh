// What becomes of a depthwise sum on its way out, in fp32 before it is rounded (kernels/activation.cuh).
//
// Constants: AFFINE (or AFFINE_AND_RESIDUAL) and ACTIVATION of an epilogue; a source without them has none. A bias
// without a scale is in the sum.
#pragma once

#ifdef ACTIVATION
#define EPILOGUE 1
#else
#define EPILOGUE 0
#define AFFINE hc::Affine::NONE
#define ACTIVATION hc::Activation::NONE
#endif

#include "kernels/activation.cuh"

namespace hc {

// y of a filter's sums, and of the elements of the residual at their places.
struct Finish {
    enum { SCALES = AFFINE == Affine::SCALE_AND_BIAS };  // a variable would be a global of every kernel
    BiasAndScale own = {};

    // `bias` is (K, 2) where there is a scale.
    __device__ __forceinline__ void load(const void* bias, int filter) {
        if constexpr (SCALES) own = static_cast<const BiasAndScale*>(bias)[filter];
    }
    __device__ __forceinline__ float operator()(float sum, float residual) const {
        if constexpr (RESIDUAL)
            return finished<SCALES ? Affine::SCALE_AND_BIAS : Affine::NONE, ACTIVATION>(sum, own, residual);
        else
            return finished<SCALES ? Affine::SCALE_AND_BIAS : Affine::NONE, ACTIVATION>(sum, own);
    }
};

// The residual at an output's place, in the tensor that p.out begins; zeros where none is wanted, or there is none.
template <class T, class Params, class Elem>
__device__ __forceinline__ T residual_at(const Params& p, const Elem* output, bool wanted) {
    T found = {};
    if constexpr (RESIDUAL)
        if (wanted) found = *reinterpret_cast<const T*>(p.residual + (output - p.out));
    return found;
}

}  // namespace hc
