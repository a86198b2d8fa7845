// The type in which tensor cores multiply elements: fp32 in TF32, others in their own.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

template <class Elem>
struct MultipliedAs {
    using type = Elem;
};
template <>
struct MultipliedAs<float> {
    using type = tf32;
};

}  // namespace hc
