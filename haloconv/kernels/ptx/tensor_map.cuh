// Tensor maps: tiles of 2 to 5 dimensions moved by TMA. Coordinates are elements, innermost first;
// what lies outside the tensor is filled on loads and left out on stores. Shared addresses are multiples of 128 bytes.
// The innermost coordinate is a multiple of 16 bytes, and no coordinate of a store is negative: the hardware takes
// anything else for an illegal instruction.
#pragma once

#include "kernels/ptx/address.cuh"

namespace hc {

// What the driver encodes (CUtensorMap). A kernel takes it by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

}  // namespace hc

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// prefetch.tensormap: a hint to fetch the map before its first use.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor.2d, global to shared: completes the whole box's bytes on the barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_shared_global(void* dst_smem, const TensorMap* map, u64* bar,
                                                                      int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(dst_smem)),
        "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1)
        : "memory");
}

// cp.async.bulk.tensor.3d, global to shared: completes the whole box's bytes on the barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_shared_global(void* dst_smem, const TensorMap* map, u64* bar,
                                                                      int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(shared_address(dst_smem)),
        "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// cp.async.bulk.tensor.4d, global to shared: completes the whole box's bytes on the barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_shared_global(void* dst_smem, const TensorMap* map, u64* bar,
                                                                      int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(shared_address(dst_smem)),
        "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// cp.async.bulk.tensor.5d, global to shared: completes the whole box's bytes on the barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_5d_shared_global(void* dst_smem, const TensorMap* map, u64* bar,
                                                                      int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(shared_address(dst_smem)),
        "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// cp.async.bulk.tensor.2d, shared to global: belongs to the thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_global_shared(const TensorMap* map, const void* src_smem,
                                                                      int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(src_smem)), "r"(c0), "r"(c1)
                 : "memory");
}

// cp.async.bulk.tensor.3d, shared to global: belongs to the thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_global_shared(const TensorMap* map, const void* src_smem,
                                                                      int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(src_smem)), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

// cp.async.bulk.tensor.4d, shared to global: belongs to the thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_global_shared(const TensorMap* map, const void* src_smem,
                                                                      int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared_address(src_smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// cp.async.bulk.tensor.5d, shared to global: belongs to the thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_5d_global_shared(const TensorMap* map, const void* src_smem,
                                                                      int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(shared_address(src_smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

// cp.async.bulk.tensor.4d.im2col, global to shared: channel c, base pixel (w, h), image n; the filter tap's offsets in
// pixels are added to every pixel. Completes pixels * channels of the map on the barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_im2col_shared_global(void* dst_smem, const TensorMap* map,
                                                                             u64* bar, int c, int w, int h, int n,
                                                                             unsigned short offset_w,
                                                                             unsigned short offset_h) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(dst_smem)),
        "l"(map), "r"(shared_address(bar)), "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h)
        : "memory");
}

}  // namespace hc::ptx
#endif
