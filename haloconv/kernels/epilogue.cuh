// Writing sums to a tensor: conversion to its element type, four at a time where memory allows.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

// Stores value[i] at to[i] where wanted[i]; one access if the four places are neighbours and aligned.
template <class T>
__device__ __forceinline__ void store4(T* const (&to)[4], const typename AccOf<T>::type (&value)[4],
                                       const bool (&wanted)[4]) {
    const bool neighbours = to[1] == to[0] + 1 && to[2] == to[0] + 2 && to[3] == to[0] + 3;
    const bool aligned = (unsigned long long)to[0] % alignof(Pack4<T>) == 0;
    if (neighbours && aligned && wanted[0] && wanted[1] && wanted[2] && wanted[3]) {
        Pack4<T> pack;
#pragma unroll
        for (int i = 0; i < 4; ++i) pack.lane[i] = from_acc<T>(value[i]);
        *reinterpret_cast<Pack4<T>*>(to[0]) = pack;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (wanted[i]) *to[i] = from_acc<T>(value[i]);
}

}  // namespace hc
