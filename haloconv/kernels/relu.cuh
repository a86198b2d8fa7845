// The activation that kernels apply to sums before they store them.
#pragma once

namespace hc {

// max(0, value) as torch.relu has it: a NaN stays one.
template <class Acc>
__device__ __forceinline__ Acc relu(Acc value) {
    return value < 0 ? 0 : value;
}

}  // namespace hc
