// Integer names of PTX operands, and the 32-bit address of shared memory that instructions take.
#pragma once

namespace hc::ptx {

using u32 = unsigned;
using u64 = unsigned long long;

// A generic pointer into shared memory as an address of its window, bytes.
__device__ __forceinline__ u32 shared_address(const void* smem) { return (u32)__cvta_generic_to_shared(smem); }

}  // namespace hc::ptx
