// CUDA's built-ins as host declarations: qualifiers, index variables, barriers, shuffles, votes, bit casts, arithmetic.
//
// Only declarations and register-to-register functions: what touches memory here would be checked as the kernel's own.
#pragma once

#define HC_EMU_INLINE inline __attribute__((always_inline))

// ---- Qualifiers ----
// A thread_local at block scope is static, may be extern, and lands in the module's TLS segment, whatever template or
// inline function holds it: so its bounds are known, and every fiber of the launching thread sees the same bytes.
// `used`: the compiler must not fold reads of what it sees no write of.
#define __shared__ __attribute__((used)) thread_local
#define __device__
#define __host__
// An entry takes in all that it calls; unlike always_inline, that goes well with recursion.
#define __global__ __attribute__((noinline, flatten))
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__ __restrict

// ---- Indices ----
// Constants of a fiber: it sees one value of each for as long as it lives.
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
extern "C" const uint3 threadIdx, blockIdx;
extern "C" const dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- Barriers and collectives (runtime/collectives.cpp) ----
extern "C" {
void __syncthreads();
int __syncthreads_count(int predicate);
int __syncthreads_and(int predicate);
int __syncthreads_or(int predicate);
void __syncwarp(unsigned mask = 0xffffffffu);
int __all_sync(unsigned mask, int predicate);
int __any_sync(unsigned mask, int predicate);
unsigned __ballot_sync(unsigned mask, int predicate);
unsigned __activemask();
void __threadfence_block();
void __threadfence();
void __nanosleep(unsigned ns);
unsigned long long hc_emu_shuffle(unsigned mask, unsigned long long bits, int kind, int operand, int width);
unsigned long long __cvta_generic_to_shared(const void* pointer);
void* __cvta_shared_to_generic(unsigned long long address);
}

namespace hc::emu {

template <class T>
HC_EMU_INLINE T shuffle(unsigned mask, T value, int kind, int operand, int width) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    if constexpr (sizeof(T) == 4) {
        const unsigned bits = __builtin_bit_cast(unsigned, value);
        return __builtin_bit_cast(T, (unsigned)hc_emu_shuffle(mask, bits, kind, operand, width));
    } else {
        const unsigned long long bits = __builtin_bit_cast(unsigned long long, value);
        return __builtin_bit_cast(T, hc_emu_shuffle(mask, bits, kind, operand, width));
    }
}

}  // namespace hc::emu

template <class T>
HC_EMU_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return hc::emu::shuffle(mask, value, 0, lane, width);
}
template <class T>
HC_EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return hc::emu::shuffle(mask, value, 1, (int)delta, width);
}
template <class T>
HC_EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return hc::emu::shuffle(mask, value, 2, (int)delta, width);
}
template <class T>
HC_EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return hc::emu::shuffle(mask, value, 3, lanes, width);
}

// ---- Bits ----
HC_EMU_INLINE unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
HC_EMU_INLINE int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
HC_EMU_INLINE float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
HC_EMU_INLINE float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
HC_EMU_INLINE long long __double_as_longlong(double value) { return __builtin_bit_cast(long long, value); }
HC_EMU_INLINE double __longlong_as_double(long long bits) { return __builtin_bit_cast(double, bits); }
HC_EMU_INLINE int __popc(unsigned bits) { return __builtin_popcount(bits); }
HC_EMU_INLINE int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
HC_EMU_INLINE int __clz(int bits) { return bits ? __builtin_clz((unsigned)bits) : 32; }
HC_EMU_INLINE int __ffs(int bits) { return __builtin_ffs(bits); }

// Byte i of the result is byte (selector >> 4 * i) & 7 of the eight bytes y:x; bit 3 replicates its sign.
HC_EMU_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> (4 * i);
        const unsigned byte = (unsigned)(bytes >> (8 * (pick & 7u))) & 255u;
        result |= (pick & 8u ? (byte & 128u ? 255u : 0u) : byte) << (8 * i);
    }
    return result;
}
HC_EMU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31u));
}
HC_EMU_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
HC_EMU_INLINE int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }

// ---- Memory and hints ----
template <class T>
HC_EMU_INLINE T __ldg(const T* from) {
    return *from;
}
HC_EMU_INLINE void __builtin_assume(bool) {}
[[noreturn]] void __trap();

// Atomic operations are ordered with one another per address; a block runs to its end before the next one starts.
#define HC_EMU_ATOMIC(T)          \
    T atomicAdd(T* at, T value);  \
    T atomicMax(T* at, T value);  \
    T atomicMin(T* at, T value);  \
    T atomicExch(T* at, T value); \
    T atomicCAS(T* at, T expected, T desired);
HC_EMU_ATOMIC(int)
HC_EMU_ATOMIC(unsigned)
HC_EMU_ATOMIC(unsigned long long)
#undef HC_EMU_ATOMIC
float atomicAdd(float* at, float value);

// ---- Arithmetic ----
extern "C" {
float sqrtf(float), rsqrtf(float), fabsf(float), floorf(float), ceilf(float), rintf(float), expf(float), exp2f(float),
    logf(float), log2f(float), erff(float), tanhf(float), fminf(float, float), fmaxf(float, float),
    fmaf(float, float, float);
double sqrt(double), fabs(double), floor(double), ceil(double), exp(double), log(double), fma(double, double, double);
}
HC_EMU_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HC_EMU_INLINE float __expf(float a) { return expf(a); }
HC_EMU_INLINE float __fdividef(float a, float b) { return a / b; }
// A NaN is the GPU's one, whatever the payload of an operand's: g++ takes a + -0 for a.
HC_EMU_INLINE float __fadd_rn(float a, float b) {
    const float sum = a + b;
    return sum != sum ? __uint_as_float(0x7fffffffu) : sum;
}
HC_EMU_INLINE float __fmul_rn(float a, float b) { return a * b; }

#define HC_EMU_MIN_MAX(T)                                   \
    HC_EMU_INLINE T min(T a, T b) { return b < a ? b : a; } \
    HC_EMU_INLINE T max(T a, T b) { return a < b ? b : a; }
HC_EMU_MIN_MAX(int)
HC_EMU_MIN_MAX(unsigned)
HC_EMU_MIN_MAX(long long)
HC_EMU_MIN_MAX(unsigned long long)
#undef HC_EMU_MIN_MAX
HC_EMU_INLINE float min(float a, float b) { return __builtin_fminf(a, b); }
HC_EMU_INLINE float max(float a, float b) { return __builtin_fmaxf(a, b); }
HC_EMU_INLINE double min(double a, double b) { return __builtin_fmin(a, b); }
HC_EMU_INLINE double max(double a, double b) { return __builtin_fmax(a, b); }
