// wgmma: d[64][N] = a[64][k] * b[k][N] (+ d) by a warpgroup, asynchronously, with fp32 sums. In thread t of the
// warpgroup, d[4 * j + 2 * i + e] is row 16 * (t / 32) + t % 32 / 4 + 8 * i, column 8 * j + 2 * (t % 4) + e. k is 8 for
// tf32 (fp32 words; their low 13 bits are ignored) and 16 for fp16 and bf16.
#pragma once

#include "kernels/ptx/address.cuh"

namespace hc {

struct fp16;
struct bf16;
struct tf32;

namespace ptx {

// The descriptor of an operand in shared memory: a K-major tile is made of groups of 8 rows, and the groups are
// `stride_bytes` apart. Row pitch = span of the swizzle: 128, 64 or 32 bytes; 0 is no swizzle, where 8 x 16 bytes are
// contiguous and neighbours along k are `leading_bytes` apart. The address may be any row of a tile; addresses and
// distances are multiples of 16 bytes.
__device__ __forceinline__ u64 smem_descriptor(u32 smem_address, u32 leading_bytes, u32 stride_bytes,
                                               u32 swizzle_bytes) {
    const u64 mode = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : swizzle_bytes == 32 ? 3 : 0;
    return mode << 62 | (u64)(stride_bytes >> 4 & 0x3fff) << 32 | (u64)(leading_bytes >> 4 & 0x3fff) << 16 |
           (smem_address >> 4 & 0x3fff);
}

// The descriptor of an operand that starts `units` of 16 bytes further on.
__device__ __forceinline__ u64 moved(u64 descriptor, u32 units) {
    return descriptor >> 32 << 32 | (u32)((u32)descriptor + units);
}

#ifndef HALOCONV_EMULATOR

// wgmma.fence: the warpgroup's registers are ready for the wgmma instructions that follow. Needed before the first, and
// again once ordinary code has touched d or a.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: closes the current group of wgmma instructions.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: at most the N youngest groups are still in flight; d of the others may be read.
template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// No instruction: keeps the compiler from moving uses of d across. For after a wait, and before a fence.
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Registers of d as operands ("+f") and as their names in the assembly, by number of registers.
#define HC_D4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define HC_D8(I) HC_D4(I), HC_D4(I + 4)
#define HC_D16(I) HC_D8(I), HC_D8(I + 8)
#define HC_D32(I) HC_D16(I), HC_D16(I + 16)
#define HC_D28(I) HC_D16(I), HC_D8(I + 16), HC_D4(I + 24)
#define HC_D40(I) HC_D32(I), HC_D8(I + 32)
#define HC_D48(I) HC_D32(I), HC_D16(I + 32)
#define HC_D56(I) HC_D48(I), HC_D8(I + 48)
#define HC_D64(I) HC_D32(I), HC_D32(I + 32)
#define HC_D80(I) HC_D64(I), HC_D16(I + 64)
#define HC_D96(I) HC_D64(I), HC_D32(I + 64)
#define HC_D112(I) HC_D96(I), HC_D16(I + 96)
#define HC_D128(I) HC_D64(I), HC_D64(I + 64)
#define HC_NAMES4 "%0, %1, %2, %3"
#define HC_NAMES8 \
    HC_NAMES4     \
    ", %4, %5, %6, %7"
#define HC_NAMES16 \
    HC_NAMES8      \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define HC_NAMES28 \
    HC_NAMES16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27"
#define HC_NAMES32 \
    HC_NAMES16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HC_NAMES40 \
    HC_NAMES32     \
    ", %32, %33, %34, %35, %36, %37, %38, %39"
#define HC_NAMES48 \
    HC_NAMES32     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HC_NAMES56 \
    HC_NAMES48     \
    ", %48, %49, %50, %51, %52, %53, %54, %55"
#define HC_NAMES64 \
    HC_NAMES48     \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HC_NAMES80 \
    HC_NAMES64     \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define HC_NAMES96 \
    HC_NAMES80     \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HC_NAMES112 \
    HC_NAMES96      \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define HC_NAMES128 \
    HC_NAMES112     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// One instruction. OPERANDS are the arguments after d, P the number of `accumulate` among all arguments.
#define HC_WGMMA(SHAPE, TYPES, REGS, OPERANDS, P, ...)                                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                                       \
                 ", 0;\n"                                                                                      \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES " {" HC_NAMES##REGS "}, " OPERANDS ";\n}" \
                 : HC_D##REGS(0)                                                                               \
                 : __VA_ARGS__)

// All three types for one N. X0 to X6 number the arguments after d.
#define HC_WGMMA_SS(N, REGS, X0, X1, X2, X3, X4)                                                                      \
    if constexpr (IS_TF32)                                                                                            \
        HC_WGMMA("m64n" #N "k8", "tf32.tf32", REGS, "%" #X0 ", %" #X1 ", p, 1, 1", X2, "l"(desc_a), "l"(desc_b),      \
                 "r"((int)accumulate));                                                                               \
    else if constexpr (IS_FP16)                                                                                       \
        HC_WGMMA("m64n" #N "k16", "f16.f16", REGS, "%" #X0 ", %" #X1 ", p, 1, 1, %" #X3 ", %" #X4, X2, "l"(desc_a),   \
                 "l"(desc_b), "r"((int)accumulate), "n"((int)A_MN_MAJOR), "n"((int)B_MN_MAJOR));                      \
    else                                                                                                              \
        HC_WGMMA("m64n" #N "k16", "bf16.bf16", REGS, "%" #X0 ", %" #X1 ", p, 1, 1, %" #X3 ", %" #X4, X2, "l"(desc_a), \
                 "l"(desc_b), "r"((int)accumulate), "n"((int)A_MN_MAJOR), "n"((int)B_MN_MAJOR))

#define HC_WGMMA_RS(N, REGS, X0, X1, X2, X3, X4, X5, X6)                                                               \
    if constexpr (IS_TF32)                                                                                             \
        HC_WGMMA("m64n" #N "k8", "tf32.tf32", REGS, "{%" #X0 ", %" #X1 ", %" #X2 ", %" #X3 "}, %" #X4 ", p, 1, 1", X5, \
                 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"((int)accumulate));                       \
    else if constexpr (IS_FP16)                                                                                        \
        HC_WGMMA("m64n" #N "k16", "f16.f16", REGS,                                                                     \
                 "{%" #X0 ", %" #X1 ", %" #X2 ", %" #X3 "}, %" #X4 ", p, 1, 1, %" #X6, X5, "r"(a[0]), "r"(a[1]),       \
                 "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"((int)accumulate), "n"((int)B_MN_MAJOR));                       \
    else                                                                                                               \
        HC_WGMMA("m64n" #N "k16", "bf16.bf16", REGS,                                                                   \
                 "{%" #X0 ", %" #X1 ", %" #X2 ", %" #X3 "}, %" #X4 ", p, 1, 1, %" #X6, X5, "r"(a[0]), "r"(a[1]),       \
                 "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"((int)accumulate), "n"((int)B_MN_MAJOR))

template <class T, class U>
inline constexpr bool SAME_TYPE = false;
template <class T>
inline constexpr bool SAME_TYPE<T, T> = true;

template <class T, int N>
__device__ __forceinline__ constexpr bool wgmma_takes() {
    return (SAME_TYPE<T, tf32> || SAME_TYPE<T, fp16> || SAME_TYPE<T, bf16>) &&
           (N == 8 || N == 16 || N == 32 || N == 56 || N == 64 || N == 80 || N == 96 || N == 112 || N == 128 ||
            N == 160 || N == 192 || N == 224 || N == 256);
}

// wgmma.mma_async, a and b in shared memory; accumulate = false overwrites d. T: hc::tf32, hc::fp16 or hc::bf16. The
// 16-bit types may be MN-major (m or n contiguous) instead of K-major.
template <class T, int N, bool A_MN_MAJOR = false, bool B_MN_MAJOR = false>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], u64 desc_a, u64 desc_b, bool accumulate) {
    constexpr bool IS_TF32 = SAME_TYPE<T, tf32>, IS_FP16 = SAME_TYPE<T, fp16>;
    static_assert(wgmma_takes<T, N>(), "this type and N are among those listed");
    static_assert(!IS_TF32 || (!A_MN_MAJOR && !B_MN_MAJOR), "TF32 operands are K-major");
    if constexpr (N == 8) {
        HC_WGMMA_SS(8, 4, 4, 5, 6, 7, 8);
    } else if constexpr (N == 16) {
        HC_WGMMA_SS(16, 8, 8, 9, 10, 11, 12);
    } else if constexpr (N == 32) {
        HC_WGMMA_SS(32, 16, 16, 17, 18, 19, 20);
    } else if constexpr (N == 56) {
        HC_WGMMA_SS(56, 28, 28, 29, 30, 31, 32);
    } else if constexpr (N == 64) {
        HC_WGMMA_SS(64, 32, 32, 33, 34, 35, 36);
    } else if constexpr (N == 80) {
        HC_WGMMA_SS(80, 40, 40, 41, 42, 43, 44);
    } else if constexpr (N == 96) {
        HC_WGMMA_SS(96, 48, 48, 49, 50, 51, 52);
    } else if constexpr (N == 112) {
        HC_WGMMA_SS(112, 56, 56, 57, 58, 59, 60);
    } else if constexpr (N == 128) {
        HC_WGMMA_SS(128, 64, 64, 65, 66, 67, 68);
    } else if constexpr (N == 160) {
        HC_WGMMA_SS(160, 80, 80, 81, 82, 83, 84);
    } else if constexpr (N == 192) {
        HC_WGMMA_SS(192, 96, 96, 97, 98, 99, 100);
    } else if constexpr (N == 224) {
        HC_WGMMA_SS(224, 112, 112, 113, 114, 115, 116);
    } else if constexpr (N == 256) {
        HC_WGMMA_SS(256, 128, 128, 129, 130, 131, 132);
    }
}

// wgmma.mma_async, a in registers (the fragment of mma.sync, 16 rows a warp), b in shared memory.
template <class T, int N, bool B_MN_MAJOR = false>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 desc_b, bool accumulate) {
    constexpr bool IS_TF32 = SAME_TYPE<T, tf32>, IS_FP16 = SAME_TYPE<T, fp16>;
    static_assert(wgmma_takes<T, N>(), "this type and N are among those listed");
    static_assert(!IS_TF32 || !B_MN_MAJOR, "TF32 operands are K-major");
    if constexpr (N == 8) {
        HC_WGMMA_RS(8, 4, 4, 5, 6, 7, 8, 9, 10);
    } else if constexpr (N == 16) {
        HC_WGMMA_RS(16, 8, 8, 9, 10, 11, 12, 13, 14);
    } else if constexpr (N == 32) {
        HC_WGMMA_RS(32, 16, 16, 17, 18, 19, 20, 21, 22);
    } else if constexpr (N == 56) {
        HC_WGMMA_RS(56, 28, 28, 29, 30, 31, 32, 33, 34);
    } else if constexpr (N == 64) {
        HC_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37, 38);
    } else if constexpr (N == 80) {
        HC_WGMMA_RS(80, 40, 40, 41, 42, 43, 44, 45, 46);
    } else if constexpr (N == 96) {
        HC_WGMMA_RS(96, 48, 48, 49, 50, 51, 52, 53, 54);
    } else if constexpr (N == 112) {
        HC_WGMMA_RS(112, 56, 56, 57, 58, 59, 60, 61, 62);
    } else if constexpr (N == 128) {
        HC_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69, 70);
    } else if constexpr (N == 160) {
        HC_WGMMA_RS(160, 80, 80, 81, 82, 83, 84, 85, 86);
    } else if constexpr (N == 192) {
        HC_WGMMA_RS(192, 96, 96, 97, 98, 99, 100, 101, 102);
    } else if constexpr (N == 224) {
        HC_WGMMA_RS(224, 112, 112, 113, 114, 115, 116, 117, 118);
    } else if constexpr (N == 256) {
        HC_WGMMA_RS(256, 128, 128, 129, 130, 131, 132, 133, 134);
    }
}

#undef HC_WGMMA_RS
#undef HC_WGMMA_SS
#undef HC_WGMMA
#undef HC_NAMES128
#undef HC_NAMES112
#undef HC_NAMES96
#undef HC_NAMES80
#undef HC_NAMES64
#undef HC_NAMES56
#undef HC_NAMES48
#undef HC_NAMES40
#undef HC_NAMES32
#undef HC_NAMES28
#undef HC_NAMES16
#undef HC_NAMES8
#undef HC_NAMES4
#undef HC_D128
#undef HC_D112
#undef HC_D96
#undef HC_D80
#undef HC_D64
#undef HC_D56
#undef HC_D48
#undef HC_D40
#undef HC_D32
#undef HC_D28
#undef HC_D16
#undef HC_D8
#undef HC_D4

#endif  // HALOCONV_EMULATOR

}  // namespace ptx
}  // namespace hc
