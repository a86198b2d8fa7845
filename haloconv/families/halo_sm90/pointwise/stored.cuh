// How sums are stored by both kernels for 1x1 layers: what a filter adds, and when buffers may be filled again.
#pragma once

#include "kernels/activation.cuh"
#include "kernels/ptx/bulk.cuh"

namespace hc {

// Bias and scale of a filter; nothing of filters behind the last one.
template <class Params>
__device__ __forceinline__ BiasAndScale own_of(const Params& p, int filter) {
    if (AFFINE == Affine::NONE || filter >= p.filters) return {};
    return bias_and_scale(p.bias[filter]);
}

// Waits until TMA has read the consumer's buffers.
template <class Consumer>
__device__ __forceinline__ void settle(const Consumer& self) {
    if (self.sends) ptx::cp_async_bulk_wait_group_read<0>();
}

}  // namespace hc
