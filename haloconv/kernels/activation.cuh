// What kernels do with a sum before they store it: y = activation(scale * sum + bias + residual), in fp32 before it is
// rounded.
//
// Exponentials and quotients are the fast ones: within 2^-17 of the value by the bounds of the CUDA programming guide
// (of __expf(x) 2 + |1.173 x| units in the last place), far below what a sum of TF32 or 16-bit products errs by.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/ptx/register.cuh"
#include "kernels/relu.cuh"

// Where a residual is added, the constant AFFINE_AND_RESIDUAL stands in the place of AFFINE, and structs have a pointer
// more: no source without a residual changes.
#ifdef AFFINE_AND_RESIDUAL
#define AFFINE AFFINE_AND_RESIDUAL
#define RESIDUAL 1
#else
#define RESIDUAL 0
#endif

namespace hc {

// What is done before the residual and the activation: nothing, + bias[filter], or scale[filter] * sum + bias[filter].
enum class Affine { NONE, BIAS, SCALE_AND_BIAS };

enum class Activation { NONE, RELU, LEAKY_RELU, SILU, GELU, GELU_TANH, HARDSWISH, SIGMOID, TANH };

// A filter's row of bias and scale, (K, 2) in fp32.
struct alignas(8) BiasAndScale {
    float bias, scale;
};

// An element of the tensor that is given as the bias.
template <class Elem, Affine KIND>
struct BiasOf {
    using type = Elem;
};
template <class Elem>
struct BiasOf<Elem, Affine::SCALE_AND_BIAS> {
    using type = BiasAndScale;
};

template <class Elem>
__device__ __forceinline__ BiasAndScale bias_and_scale(const Elem& bias) {
    return {to_acc(bias), 1.f};
}
__device__ __forceinline__ BiasAndScale bias_and_scale(const BiasAndScale& both) { return both; }

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// The activation KIND of x, as torch.nn.functional defines it: a NaN stays one.
template <Activation KIND>
__device__ __forceinline__ float activated(float x) {
    if constexpr (KIND == Activation::RELU) return relu(x);
    if constexpr (KIND == Activation::LEAKY_RELU) return x < 0 ? 0.01f * x : x;
    if constexpr (KIND == Activation::SILU) return __fdividef(x, 1.f + __expf(-x));
    if constexpr (KIND == Activation::GELU) return 0.5f * x * (1.f + erff(x * 0.70710678f));
    if constexpr (KIND == Activation::GELU_TANH)
        return 0.5f * x * (1.f + tanhf(0.79788456f * fmaf(0.044715f * x, x * x, x)));
    if constexpr (KIND == Activation::HARDSWISH) return x * fminf(fmaxf(x + 3.f, 0.f), 6.f) * (1.f / 6.f);
    if constexpr (KIND == Activation::SIGMOID) return sigmoid(x);
    if constexpr (KIND == Activation::TANH) return tanhf(x);
    return x;
}

// Whether the compiler would begin more of them at a time than there are registers for: they begin one after the other,
// and a kernel may have to leave a loop rolled. (A variable would be a global of every kernel.)
template <Activation KIND>
struct IsLong {
    enum { VALUE = KIND == Activation::SILU || KIND == Activation::GELU || KIND == Activation::SIGMOID };
};

// y of a sum and its filter's bias and scale.
template <Affine BEFORE, Activation KIND>
__device__ __forceinline__ float finished(float sum, const BiasAndScale& own) {
    if constexpr (IsLong<KIND>::VALUE) ptx::renew(sum);
    if constexpr (BEFORE == Affine::SCALE_AND_BIAS) sum = fmaf(sum, own.scale, own.bias);
    if constexpr (BEFORE == Affine::BIAS) sum += own.bias;
    return activated<KIND>(sum);
}

// y of a sum, its filter's bias and scale, and the element of the residual at y's place.
template <Affine BEFORE, Activation KIND>
__device__ __forceinline__ float finished(float sum, const BiasAndScale& own, float residual) {
    return finished<Affine::NONE, KIND>(finished<BEFORE, Activation::NONE>(sum, own) + residual, own);
}

}  // namespace hc
