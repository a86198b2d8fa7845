// The wrappers of kernels/ptx/*.cuh as the emulator has them: the same names and types, each a call of the runtime.
//
// Kernel sources see these instead of the PTX bodies. A wrapper is always inlined, so that the return address of the
// runtime's function is a place in the kernel. Conversions are computed here: they touch no memory.
#pragma once

namespace hc {
struct fp16;
struct bf16;
struct tf32;
struct TensorMap;
}  // namespace hc

extern "C" {
void hc_emu_mbarrier_init(void* bar, unsigned arrivals);
void hc_emu_fence_mbarrier_init();
void hc_emu_mbarrier_arrive(void* bar);
void hc_emu_mbarrier_arrive_expect_tx(void* bar, unsigned bytes);
void hc_emu_mbarrier_expect_tx(void* bar, unsigned bytes);
bool hc_emu_mbarrier_try_wait_parity(void* bar, unsigned parity);
void hc_emu_mbarrier_inval(void* bar);
void hc_emu_bulk_load(void* dst_smem, const void* src, unsigned bytes, void* bar);
void hc_emu_bulk_store(void* dst, const void* src_smem, unsigned bytes);
void hc_emu_bulk_commit_group();
void hc_emu_bulk_wait_group(int youngest, bool reads_only);
void hc_emu_tensor_load(void* dst_smem, const void* map, void* bar, int rank, int c0, int c1, int c2, int c3, int c4);
void hc_emu_tensor_store(const void* map, const void* src_smem, int rank, int c0, int c1, int c2, int c3, int c4);
void hc_emu_tensor_load_im2col(void* dst_smem, const void* map, void* bar, int c, int w, int h, int n,
                               unsigned offset_w, unsigned offset_h);
void hc_emu_prefetch_tensormap(const void* map);
void hc_emu_fence_proxy_async();
unsigned hc_emu_cluster_rank();
void hc_emu_cluster_sync();
const void* hc_emu_peer_shared(const void* smem, unsigned rank);
void hc_emu_bar(unsigned id, unsigned threads, bool waits);
void hc_emu_setmaxnreg(int registers, bool increase);
void hc_emu_cp_async(void* dst_smem, const void* src, unsigned bytes, unsigned src_bytes);
void hc_emu_cp_async_commit_group();
void hc_emu_cp_async_wait_group(int youngest);
void hc_emu_cp_async_mbarrier_arrive_noinc(void* bar);
void hc_emu_mma(float* d, const unsigned* a, const unsigned* b, int type);
void hc_emu_mma_f64(double* d, const double* a, const double* b, int rows, int depth);
void hc_emu_ldmatrix(unsigned* r, const void* smem, int matrices, bool transpose);
void hc_emu_stmatrix(void* smem, const unsigned* r, int matrices, bool transpose);
void hc_emu_wgmma_fence();
void hc_emu_wgmma_ss(float* d, unsigned long long desc_a, unsigned long long desc_b, bool accumulate, int shape);
void hc_emu_wgmma_rs(float* d, const unsigned* a, unsigned long long desc_b, bool accumulate, int shape);
void hc_emu_wgmma_commit_group();
void hc_emu_wgmma_wait_group(int youngest);
}

namespace hc::ptx {

using u32 = unsigned;
using u64 = unsigned long long;

// ---- Conversions, bit-exact ----

__device__ __forceinline__ u32 emu_bits(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}

__device__ __forceinline__ float emu_float(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

__device__ __forceinline__ float cvt_f32_f16(unsigned short bits) {
    const u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ffu;
    if (exponent == 31) return emu_float(fraction ? 0x7fffffffu : sign | 0x7f800000u);
    if (exponent) return emu_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = (float)fraction * 0x1p-24f;
    return sign ? -small : small;
}

__device__ __forceinline__ unsigned short cvt_rn_f16_f32(float value) {
    const u32 bits = emu_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
    if (magnitude >= 0x38800000u)                         // 2^-14 and above are normal
        return sign | (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    // Below, adding 0.5 makes the hardware round to multiples of 2^-24 (to nearest even), which are the low bits.
    return sign | (emu_bits(emu_float(magnitude) + 0.5f) - 0x3f000000u);
}

__device__ __forceinline__ u32 cvt_rn_f16x2_f32(float high, float low) {
    return (u32)cvt_rn_f16_f32(high) << 16 | cvt_rn_f16_f32(low);
}

__device__ __forceinline__ u32 emu_bf16(float value) {
    const u32 bits = emu_bits(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : bits + 0x7fffu + (bits >> 16 & 1u) >> 16;
}
__device__ __forceinline__ u32 cvt_rn_bf16x2_f32(float high, float low) { return emu_bf16(high) << 16 | emu_bf16(low); }

// Infinities and NaNs are cut, not rounded: a NaN whose payload lies in the low 13 bits becomes infinite, as on sm_90.
__device__ __forceinline__ u32 cvt_rna_tf32(float value) {
    const u32 bits = emu_bits(value), finite = (bits & 0x7f800000u) != 0x7f800000u;
    return (bits + (finite ? 0x1000u : 0u)) & 0xffffe000u;
}

// ---- mbarrier ----

__device__ __forceinline__ void mbarrier_init(u64* bar, u32 arrivals) { hc_emu_mbarrier_init(bar, arrivals); }
__device__ __forceinline__ void fence_mbarrier_init() { hc_emu_fence_mbarrier_init(); }
__device__ __forceinline__ void mbarrier_arrive(u64* bar) { hc_emu_mbarrier_arrive(bar); }
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
    hc_emu_mbarrier_arrive_expect_tx(bar, bytes);
}
__device__ __forceinline__ void mbarrier_expect_tx(u64* bar, u32 bytes) { hc_emu_mbarrier_expect_tx(bar, bytes); }
__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* bar, u32 parity) {
    return hc_emu_mbarrier_try_wait_parity(bar, parity);
}
__device__ __forceinline__ bool mbarrier_test_wait_parity(u64* bar, u32 parity) {
    return hc_emu_mbarrier_try_wait_parity(bar, parity);
}
__device__ __forceinline__ void mbarrier_inval(u64* bar) { hc_emu_mbarrier_inval(bar); }

// ---- Bulk copies ----

__device__ __forceinline__ void cp_async_bulk_shared_global(void* dst_smem, const void* src, u32 bytes, u64* bar) {
    hc_emu_bulk_load(dst_smem, src, bytes, bar);
}
__device__ __forceinline__ void cp_async_bulk_global_shared(void* dst, const void* src_smem, u32 bytes) {
    hc_emu_bulk_store(dst, src_smem, bytes);
}
__device__ __forceinline__ void cp_async_bulk_commit_group() { hc_emu_bulk_commit_group(); }
template <int N>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    hc_emu_bulk_wait_group(N, false);
}
template <int N>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    hc_emu_bulk_wait_group(N, true);
}

// ---- Tensor maps ----

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) { hc_emu_prefetch_tensormap(map); }
__device__ __forceinline__ void cp_async_bulk_tensor_2d_shared_global(void* dst_smem, const TensorMap* map, u64* bar,
                                                                      int c0, int c1) {
    hc_emu_tensor_load(dst_smem, map, bar, 2, c0, c1, 0, 0, 0);
}
__device__ __forceinline__ void cp_async_bulk_tensor_3d_shared_global(void* dst_smem, const TensorMap* map, u64* bar,
                                                                      int c0, int c1, int c2) {
    hc_emu_tensor_load(dst_smem, map, bar, 3, c0, c1, c2, 0, 0);
}
__device__ __forceinline__ void cp_async_bulk_tensor_4d_shared_global(void* dst_smem, const TensorMap* map, u64* bar,
                                                                      int c0, int c1, int c2, int c3) {
    hc_emu_tensor_load(dst_smem, map, bar, 4, c0, c1, c2, c3, 0);
}
__device__ __forceinline__ void cp_async_bulk_tensor_5d_shared_global(void* dst_smem, const TensorMap* map, u64* bar,
                                                                      int c0, int c1, int c2, int c3, int c4) {
    hc_emu_tensor_load(dst_smem, map, bar, 5, c0, c1, c2, c3, c4);
}
__device__ __forceinline__ void cp_async_bulk_tensor_2d_global_shared(const TensorMap* map, const void* src_smem,
                                                                      int c0, int c1) {
    hc_emu_tensor_store(map, src_smem, 2, c0, c1, 0, 0, 0);
}
__device__ __forceinline__ void cp_async_bulk_tensor_3d_global_shared(const TensorMap* map, const void* src_smem,
                                                                      int c0, int c1, int c2) {
    hc_emu_tensor_store(map, src_smem, 3, c0, c1, c2, 0, 0);
}
__device__ __forceinline__ void cp_async_bulk_tensor_4d_global_shared(const TensorMap* map, const void* src_smem,
                                                                      int c0, int c1, int c2, int c3) {
    hc_emu_tensor_store(map, src_smem, 4, c0, c1, c2, c3, 0);
}
__device__ __forceinline__ void cp_async_bulk_tensor_5d_global_shared(const TensorMap* map, const void* src_smem,
                                                                      int c0, int c1, int c2, int c3, int c4) {
    hc_emu_tensor_store(map, src_smem, 5, c0, c1, c2, c3, c4);
}
__device__ __forceinline__ void cp_async_bulk_tensor_4d_im2col_shared_global(void* dst_smem, const TensorMap* map,
                                                                             u64* bar, int c, int w, int h, int n,
                                                                             unsigned short offset_w,
                                                                             unsigned short offset_h) {
    hc_emu_tensor_load_im2col(dst_smem, map, bar, c, w, h, n, offset_w, offset_h);
}

// ---- Fences, named barriers, registers ----

__device__ __forceinline__ void fence_proxy_async_shared() { hc_emu_fence_proxy_async(); }
__device__ __forceinline__ void griddepcontrol_wait() {}
__device__ __forceinline__ void griddepcontrol_launch_dependents() {}
__device__ __forceinline__ bool elect_sync() { return threadIdx.x % 32 == 0; }
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) { hc_emu_bar(id, threads, true); }
__device__ __forceinline__ void bar_arrive(u32 id, u32 threads) { hc_emu_bar(id, threads, false); }
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
    hc_emu_setmaxnreg(N, true);
}
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
    hc_emu_setmaxnreg(N, false);
}

// ---- Clusters ----

__device__ __forceinline__ u32 cluster_rank() { return hc_emu_cluster_rank(); }
__device__ __forceinline__ void cluster_sync() { hc_emu_cluster_sync(); }
template <class T>
__device__ __forceinline__ const T* peer_shared(const T* smem, u32 rank) {
    return static_cast<const T*>(hc_emu_peer_shared(smem, rank));
}

// ---- cp.async ----

__device__ __forceinline__ void cp_async_4(void* dst_smem, const void* src, u32 src_bytes) {
    hc_emu_cp_async(dst_smem, src, 4, src_bytes);
}
__device__ __forceinline__ void cp_async_8(void* dst_smem, const void* src, u32 src_bytes) {
    hc_emu_cp_async(dst_smem, src, 8, src_bytes);
}
__device__ __forceinline__ void cp_async_16(void* dst_smem, const void* src, u32 src_bytes) {
    hc_emu_cp_async(dst_smem, src, 16, src_bytes);
}
__device__ __forceinline__ void cp_async_commit_group() { hc_emu_cp_async_commit_group(); }
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
    hc_emu_cp_async_wait_group(N);
}
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u64* bar) { hc_emu_cp_async_mbarrier_arrive_noinc(bar); }

// ---- Warp-wide products and matrices. Types: 0 tf32, 1 fp16, 2 bf16 ----

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    hc_emu_mma(d, a, b, 0);
}
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    hc_emu_mma(d, a, b, 1);
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    hc_emu_mma(d, a, b, 2);
}
__device__ __forceinline__ void mma_m16n8k4_tf32(float (&d)[4], const u32 (&a)[2], u32 b) {
    mma_m16n8k8_tf32(d, {a[0], a[1], 0, 0}, {b, 0});
}
__device__ __forceinline__ void mma_m16n8k8_fp16(float (&d)[4], const u32 (&a)[2], u32 b) {
    mma_m16n8k16_fp16(d, {a[0], a[1], 0, 0}, {b, 0});
}
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], const u32 (&a)[2], u32 b) {
    mma_m16n8k16_bf16(d, {a[0], a[1], 0, 0}, {b, 0});
}
__device__ __forceinline__ void mma_m8n8k4_f64(double (&d)[2], double a, double b) { hc_emu_mma_f64(d, &a, &b, 8, 4); }
__device__ __forceinline__ void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
    hc_emu_mma_f64(d, a, b, 16, 8);
}
__device__ __forceinline__ void mma_m16n8k16_f64(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
    hc_emu_mma_f64(d, a, b, 16, 16);
}
__device__ __forceinline__ void ldmatrix_x1(u32 (&r)[1], const void* smem) { hc_emu_ldmatrix(r, smem, 1, false); }
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], const void* smem) { hc_emu_ldmatrix(r, smem, 2, false); }
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* smem) { hc_emu_ldmatrix(r, smem, 4, false); }
__device__ __forceinline__ void ldmatrix_x1_trans(u32 (&r)[1], const void* smem) { hc_emu_ldmatrix(r, smem, 1, true); }
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], const void* smem) { hc_emu_ldmatrix(r, smem, 2, true); }
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* smem) { hc_emu_ldmatrix(r, smem, 4, true); }
__device__ __forceinline__ void stmatrix_x1(void* smem, const u32 (&r)[1]) { hc_emu_stmatrix(smem, r, 1, false); }
__device__ __forceinline__ void stmatrix_x2(void* smem, const u32 (&r)[2]) { hc_emu_stmatrix(smem, r, 2, false); }
__device__ __forceinline__ void stmatrix_x4(void* smem, const u32 (&r)[4]) { hc_emu_stmatrix(smem, r, 4, false); }
__device__ __forceinline__ void stmatrix_x1_trans(void* smem, const u32 (&r)[1]) { hc_emu_stmatrix(smem, r, 1, true); }
__device__ __forceinline__ void stmatrix_x2_trans(void* smem, const u32 (&r)[2]) { hc_emu_stmatrix(smem, r, 2, true); }
__device__ __forceinline__ void stmatrix_x4_trans(void* smem, const u32 (&r)[4]) { hc_emu_stmatrix(smem, r, 4, true); }

// ---- wgmma ----

template <class T>
inline constexpr int EMU_TYPE = -1;
template <>
inline constexpr int EMU_TYPE<tf32> = 0;
template <>
inline constexpr int EMU_TYPE<fp16> = 1;
template <>
inline constexpr int EMU_TYPE<bf16> = 2;

// The fixed part of a wgmma in one number: N, type, and which operands are MN-major.
template <class T, int N, bool A_MN_MAJOR, bool B_MN_MAJOR>
__device__ __forceinline__ constexpr int emu_shape() {
    static_assert(EMU_TYPE<T> >= 0, "T is hc::tf32, hc::fp16 or hc::bf16");
    static_assert(N == 8 || N == 16 || N == 32 || N == 56 || N == 64 || N == 80 || N == 96 || N == 112 || N == 128 ||
                      N == 160 || N == 192 || N == 224 || N == 256,
                  "N is among those listed");
    static_assert(EMU_TYPE<T> != 0 || (!A_MN_MAJOR && !B_MN_MAJOR), "TF32 operands are K-major");
    return N | EMU_TYPE<T> << 16 | A_MN_MAJOR << 20 | B_MN_MAJOR << 21;
}

__device__ __forceinline__ void wgmma_fence() { hc_emu_wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit_group() { hc_emu_wgmma_commit_group(); }
template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
    hc_emu_wgmma_wait_group(N);
}
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(float (&)[COUNT]) {}
template <class T, int N, bool A_MN_MAJOR = false, bool B_MN_MAJOR = false>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], u64 desc_a, u64 desc_b, bool accumulate) {
    hc_emu_wgmma_ss(d, desc_a, desc_b, accumulate, emu_shape<T, N, A_MN_MAJOR, B_MN_MAJOR>());
}
template <class T, int N, bool B_MN_MAJOR = false>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 desc_b, bool accumulate) {
    hc_emu_wgmma_rs(d, a, desc_b, accumulate, emu_shape<T, N, false, B_MN_MAJOR>());
}

}  // namespace hc::ptx
