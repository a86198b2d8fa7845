// The taps of one channel's filter in global memory.
//
// Constants: R and S, the filter's taps, and DGRAD. A kernel's Params has w, w_k, w_r and w_s.
#pragma once

namespace hc {

template <class Params>
__device__ __forceinline__ auto filter_of(const Params& p, int channel) {
    return p.w + channel * p.w_k;
}

// Tap (r, s) as it meets a window: dgrad takes the filter flipped.
template <class Params, class Elem>
__device__ __forceinline__ Elem tap(const Params& p, const Elem* filter, int r, int s) {
    return filter[(DGRAD ? R - 1 - r : r) * p.w_r + (DGRAD ? S - 1 - s : s) * p.w_s];
}

}  // namespace hc
