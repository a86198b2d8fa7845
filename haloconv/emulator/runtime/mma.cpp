// Warp-wide tensor-core products (mma.sync) and 8x8 matrix moves (ldmatrix, stmatrix), and number formats.
//
// The lanes of a warp meet, and the last of them does the work of all. Sums are fp32, or fp64 of fp64, from k = 0 upwards
// on top of d, each product exact and each addition rounded to nearest (fused); the hardware's order and rounding differ.

#include <cmath>

#include "engines.h"

namespace hc::emu {

namespace {

// What a lane brought to the warp's meeting.
struct Lane {
    float* d;
    const u32 *a, *b;
    u32* r;
    const void* row;
};

// The same of a product in fp64.
struct LaneF64 {
    double* d;
    const double *a, *b;
};

constexpr u32 MAX_WARPS = 32;
Lane lanes[MAX_WARPS][32];
LaneF64 lanes_f64[MAX_WARPS][32];

Lane* own_warp() { return lanes[warp_id()]; }

void check_whole_warp(const char* what, Site site) {
    if (warp_threads() != 32) fatal("collective", site, "%s in a warp of %u threads", what, warp_threads());
}

void multiply(const Lane* warp, MatrixType type) {
    const u32 depth = type == TF32 ? 8 : 16, per_register = type == TF32 ? 1 : 2, quarter = 4 * per_register;
    float a[16][16], b[16][8];
    for (u32 lane = 0; lane < 32; ++lane) {
        const u32 group = lane / 4, first = lane % 4 * per_register;
        for (u32 i = 0; i < 4; ++i)
            for (u32 e = 0; e < per_register; ++e)
                a[group + i % 2 * 8][first + i / 2 * quarter + e] = element(&warp[lane].a[i], e, type);
        for (u32 i = 0; i < 2; ++i)
            for (u32 e = 0; e < per_register; ++e)
                b[first + i * quarter + e][group] = element(&warp[lane].b[i], e, type);
    }
    for (u32 lane = 0; lane < 32; ++lane)
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            float sum = warp[lane].d[i];
            for (u32 k = 0; k < depth; ++k) sum = std::fma(a[row][k], b[k][col], sum);
            warp[lane].d[i] = sum;
        }
    count(MULTIPLIES, 16 * 8 * depth);
}

void multiply_f64(const LaneF64* warp, u32 rows, u32 depth) {
    const u32 halves = rows / 8;
    double a[16][16], b[16][8];
    for (u32 lane = 0; lane < 32; ++lane)
        for (u32 i = 0; i < depth / 4; ++i) {
            const u32 k = lane % 4 + 4 * i;
            for (u32 half = 0; half < halves; ++half) a[lane / 4 + 8 * half][k] = warp[lane].a[i * halves + half];
            b[k][lane / 4] = warp[lane].b[i];
        }
    for (u32 lane = 0; lane < 32; ++lane)
        for (u32 i = 0; i < 2 * halves; ++i) {
            const u32 row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            double sum = warp[lane].d[i];
            for (u32 k = 0; k < depth; ++k) sum = std::fma(a[row][k], b[k][col], sum);
            warp[lane].d[i] = sum;
        }
    count(MULTIPLIES, rows * 8 * depth);
}

void load_matrices(const Lane* warp, u32 matrices, bool transpose) {
    for (u32 m = 0; m < matrices; ++m) {
        u16 matrix[8][8];
        for (u32 row = 0; row < 8; ++row) std::memcpy(matrix[row], warp[m * 8 + row].row, 16);
        for (u32 lane = 0; lane < 32; ++lane) {
            const u32 line = lane / 4, first = lane % 4 * 2;
            const u16 low = transpose ? matrix[first][line] : matrix[line][first];
            const u16 high = transpose ? matrix[first + 1][line] : matrix[line][first + 1];
            warp[lane].r[m] = u32(high) << 16 | low;
        }
    }
}

void store_matrices(const Lane* warp, u32 matrices, bool transpose) {
    for (u32 m = 0; m < matrices; ++m) {
        u16 matrix[8][8];
        for (u32 lane = 0; lane < 32; ++lane) {
            const u32 line = lane / 4, first = lane % 4 * 2;
            (transpose ? matrix[first][line] : matrix[line][first]) = u16(warp[lane].r[m]);
            (transpose ? matrix[first + 1][line] : matrix[line][first + 1]) = u16(warp[lane].r[m] >> 16);
        }
        for (u32 row = 0; row < 8; ++row) std::memcpy(const_cast<void*>(warp[m * 8 + row].row), matrix[row], 16);
    }
}

// Normal, subnormal, infinite: as cvt.f32.f16, but NaNs stay what they are.
float widen_fp16(u16 bits) {
    const u32 sign = u32(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = float(fraction) * 0x1p-24f;
    return sign ? -small : small;
}

struct Fp16Table {
    std::vector<float> values;
    Fp16Table() : values(1 << 16) {
        for (u32 bits = 0; bits < values.size(); ++bits) values[bits] = widen_fp16(u16(bits));
    }
};

}  // namespace

float float_of_fp16(u16 bits) {
    static const Fp16Table table;
    return table.values[bits];
}

float element(const void* packed, u32 index, MatrixType type) {
    if (type == TF32) {
        u32 word;
        std::memcpy(&word, static_cast<const u8*>(packed) + 4 * index, 4);
        return float_of_tf32(word);
    }
    u16 half;
    std::memcpy(&half, static_cast<const u8*>(packed) + 2 * index, 2);
    return type == FP16 ? float_of_fp16(half) : float_of_bf16(half);
}

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

void hc_emu_mma(float* d, const unsigned* a, const unsigned* b, int type) {
    const Site site = HC_EMU_SITE;
    check_whole_warp("mma.sync", site);
    Lane* const warp = own_warp();
    warp[lane_id()] = {d, a, b, nullptr, nullptr};
    meet_warp("mma.sync", site, [=] { multiply(warp, MatrixType(type)); });
}

void hc_emu_mma_f64(double* d, const double* a, const double* b, int rows, int depth) {
    const Site site = HC_EMU_SITE;
    check_whole_warp("mma.sync", site);
    LaneF64* const warp = lanes_f64[warp_id()];
    warp[lane_id()] = {d, a, b};
    meet_warp("mma.sync", site, [=] { multiply_f64(warp, rows, depth); });
}

void hc_emu_ldmatrix(unsigned* r, const void* smem, int matrices, bool transpose) {
    const Site site = HC_EMU_SITE;
    check_whole_warp("ldmatrix", site);
    Lane* const warp = own_warp();
    if (lane_id() < 8u * matrices) shared_read(smem, 16, 16, site);
    warp[lane_id()] = {nullptr, nullptr, nullptr, r, smem};
    meet_warp("ldmatrix", site, [=] { load_matrices(warp, matrices, transpose); });
}

void hc_emu_stmatrix(void* smem, const unsigned* r, int matrices, bool transpose) {
    const Site site = HC_EMU_SITE;
    check_whole_warp("stmatrix", site);
    Lane* const warp = own_warp();
    if (lane_id() < 8u * matrices) shared_write(smem, 16, 16, site);
    warp[lane_id()] = {nullptr, nullptr, nullptr, const_cast<u32*>(r), smem};
    meet_warp("stmatrix", site, [=] { store_matrices(warp, matrices, transpose); });
}

}  // extern "C"
