// The activation that halo_sm90 applies on the way out.
#pragma once

namespace hc {

// max(0, value) as torch.relu has it: a NaN stays one.
__device__ __forceinline__ float relu(float value) { return value < 0.f ? 0.f : value; }

}  // namespace hc
