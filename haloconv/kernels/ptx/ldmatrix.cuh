// 8x8 matrices of 16-bit elements between shared memory and a warp's registers. Lane 8 * i + j gives the address of row
// j of matrix i (16 bytes, aligned so). r[i] of lane l: elements 2 * (l % 4) and the next of row l / 4 of matrix i;
// in the _trans forms, of column l / 4.
#pragma once

#include "kernels/ptx/address.cuh"

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// ldmatrix.x1.
__device__ __forceinline__ void ldmatrix_x1(u32 (&r)[1], const void* smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(shared_address(smem))
                 : "memory");
}

// ldmatrix.x2.
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], const void* smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(smem))
                 : "memory");
}

// ldmatrix.x4.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(smem))
                 : "memory");
}

// ldmatrix.x1.trans.
__device__ __forceinline__ void ldmatrix_x1_trans(u32 (&r)[1], const void* smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(shared_address(smem))
                 : "memory");
}

// ldmatrix.x2.trans.
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], const void* smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(smem))
                 : "memory");
}

// ldmatrix.x4.trans.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(smem))
                 : "memory");
}

// stmatrix.x1.
__device__ __forceinline__ void stmatrix_x1(void* smem, const u32 (&r)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};"
                 :
                 : "r"(shared_address(smem)), "r"(r[0])
                 : "memory");
}

// stmatrix.x2.
__device__ __forceinline__ void stmatrix_x2(void* smem, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                 :
                 : "r"(shared_address(smem)), "r"(r[0]), "r"(r[1])
                 : "memory");
}

// stmatrix.x4.
__device__ __forceinline__ void stmatrix_x4(void* smem, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(smem)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// stmatrix.x1.trans.
__device__ __forceinline__ void stmatrix_x1_trans(void* smem, const u32 (&r)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
                 :
                 : "r"(shared_address(smem)), "r"(r[0])
                 : "memory");
}

// stmatrix.x2.trans.
__device__ __forceinline__ void stmatrix_x2_trans(void* smem, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :
                 : "r"(shared_address(smem)), "r"(r[0]), "r"(r[1])
                 : "memory");
}

// stmatrix.x4.trans.
__device__ __forceinline__ void stmatrix_x4_trans(void* smem, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(smem)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

}  // namespace hc::ptx
#endif
