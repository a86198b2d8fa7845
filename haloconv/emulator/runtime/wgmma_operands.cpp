// wgmma's operands, decoded bit by bit, and its product.
//
// Addresses are formed without the swizzle and then swizzled as a whole, so that a tile may start at any of its rows.

#include <algorithm>
#include <cmath>

#include "wgmma.h"

namespace hc::emu {

namespace {

constexpr u32 CHUNK = 16, ROWS = 16, MAX_N = 256, MAX_DEPTH = 16;

#define HC_EMU_INLINE inline __attribute__((always_inline))  // also into functions for other instructions

// One operand's numbers as the tensor cores take them: sign (0 or -1), significand of 11 bits, exponent of its first bit
// before the point. Zero has an exponent below all others.
struct Parts {
    int sign, significand, exponent;
};

constexpr int NO_EXPONENT = -2048, SMALLEST_NORMAL = -126;
constexpr int FRACTION = 25;  // bits that aligned addends keep behind the point of the one with the largest exponent

HC_EMU_INLINE Parts parts_of(float value) {
    u32 word;
    std::memcpy(&word, &value, 4);
    const int field = word >> 23 & 0xff, significand = (int(word & 0x7fffff) | (field ? 1 << 23 : 0)) >> 13;
    return {int(word) >> 31, significand, significand ? (field ? field : 1) - 127 : NO_EXPONENT};
}

// What is known of some numbers together: their largest magnitude, as bits, and whether all are integers below 2^24.
struct Values {
    u32 largest;
    bool whole;

    HC_EMU_INLINE Values(const float* values, u32 count) : largest(0) {
        int fractions = 0;
        for (u32 i = 0; i < count; ++i) {
            u32 word;
            std::memcpy(&word, values + i, 4);
            word &= 0x7fffffff;
            largest = std::max(largest, word);
            const float bounded = word < 0x4b800000 ? values[i] : 0.5f;
            fractions |= float(int(bounded)) != bounded;
        }
        whole = !fractions;
    }
    bool finite() const { return largest < 0x7f800000; }
    double most() const {
        float value;
        std::memcpy(&value, &largest, 4);
        return value;
    }
};

// The sum of aligned addends, in units of 2^(exponent - FRACTION), cut toward zero to fp32, where it may be subnormal.
float cut_subnormal(double sum, int exponent) {
    if (sum == 0) return 0;
    const double value = std::ldexp(sum, exponent - FRACTION),
                 unit = std::ldexp(1, std::max(std::ilogb(value) - 23, -149));
    return float(std::trunc(value / unit) * unit);
}

constexpr u32 LANES = 8;  // columns at a time
using Ints = int __attribute__((vector_size(32)));
using Longs = long long __attribute__((vector_size(64)));
using Doubles = double __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(32)));

HC_EMU_INLINE void load(Ints& to, const void* from) { std::memcpy(&to, from, sizeof to); }

HC_EMU_INLINE void align(Ints& value, const Ints& down) { value >>= down < 31 ? down : Ints{} + 31; }

HC_EMU_INLINE void negate(Ints& value, const Ints& sign) { value = (value ^ sign) - sign; }

// The sums of a row and 8 columns that are all finite, and the products of `depth` parts of a with those of b's columns,
// `pitch` apart from k to k: all are aligned to the largest exponent, cut there, and added without further loss.
HC_EMU_INLINE void multiply_eight(float* sums, const Parts* a, const int* signs, const int* significands,
                                  const int* exponents, u32 pitch, u32 depth) {
    Ints words, each;
    load(words, sums);
    const Ints fields = words >> 23 & 0xff, exponent = (fields > 1 ? fields : Ints{} + 1) - 127;
    Ints significand = (words & 0x7fffff) | (fields > 0 ? Ints{} + (1 << 23) : Ints{});
    Ints most = significand > 0 ? exponent : Ints{} + NO_EXPONENT;
    for (u32 k = 0; k < depth; ++k) {
        load(each, exponents + k * pitch);
        each += a[k].exponent;
        most = each > most ? each : most;
    }
    significand <<= FRACTION - 23;
    align(significand, most - exponent);
    negate(significand, words >> 31);
    Ints total[2] = {significand, {}};  // of eight products each, which 32 bits hold
    for (u32 k = 0; k < depth; ++k) {
        Ints product, sign;
        load(each, exponents + k * pitch);
        load(product, significands + k * pitch);
        load(sign, signs + k * pitch);
        product *= a[k].significand << (FRACTION - 20);
        align(product, most - a[k].exponent - each);
        negate(product, sign ^ a[k].sign);
        total[k / 8] += product;
    }
    const Doubles sum = __builtin_convertvector(total[0], Doubles) + __builtin_convertvector(total[1], Doubles);
    const Ints tiny = (most > NO_EXPONENT / 2) & (most < SMALLEST_NORMAL + FRACTION);
    bool any_tiny = false;
    for (u32 i = 0; i < LANES; ++i) any_tiny |= tiny[i];
    if (any_tiny) {
        for (u32 i = 0; i < LANES; ++i) sums[i] = cut_subnormal(sum[i], most[i]);
        return;
    }
    const Ints scale = (most > NO_EXPONENT / 2 ? most : Ints{}) + (1023 - FRACTION);
    const Longs powers = __builtin_convertvector(scale, Longs) << 52;
    const Longs cut = Longs(sum * Doubles(powers)) & ~0x1fffffffLL;
    const Floats result = __builtin_convertvector(Doubles(cut), Floats);
    std::memcpy(sums, &result, sizeof result);
}

HC_EMU_INLINE void multiply_finite(float* sums, const float* a, const float* b, u32 n, u32 depth) {
    static int signs[MAX_DEPTH * MAX_N], significands[MAX_DEPTH * MAX_N], exponents[MAX_DEPTH * MAX_N];
    for (u32 i = 0; i < depth * n; ++i) {
        const Parts parts = parts_of(b[i]);
        signs[i] = parts.sign, significands[i] = parts.significand, exponents[i] = parts.exponent;
    }
    Parts rows[ROWS * MAX_DEPTH];
    for (u32 i = 0; i < ROWS * depth; ++i) rows[i] = parts_of(a[i]);
    for (u32 row = 0; row < ROWS; ++row)
        for (u32 col = 0; col < n; col += LANES)
            multiply_eight(sums + row * n + col, rows + row * depth, signs + col, significands + col, exponents + col,
                           n, depth);
}

// In fp32, for integers of which every sum is exact, and for numbers that are not all finite: any order and rounding
// gives the same sums, infinities and NaN.
HC_EMU_INLINE void multiply_any(float* sums, const float* a, const float* b, u32 n, u32 depth) {
    for (u32 row = 0; row < ROWS; ++row)
        for (u32 col = 0; col < n; col += LANES) {
            Floats sum, each;
            std::memcpy(&sum, sums + row * n + col, sizeof sum);
            for (u32 k = 0; k < depth; ++k) {
                std::memcpy(&each, b + k * n + col, sizeof each);
                sum += a[row * depth + k] * each;
            }
            std::memcpy(sums + row * n + col, &sum, sizeof sum);
        }
}

HC_EMU_INLINE void multiply(float* sums, const float* a, const float* b, u32 n, u32 depth) {
    const Values before(sums, ROWS * n), left(a, ROWS * depth), right(b, depth * n);
    const bool finite = before.finite() && left.finite() && right.finite(),
               whole = before.whole && left.whole && right.whole;
    if (!finite || (whole && before.most() + depth * left.most() * right.most() < 0x1p24))
        multiply_any(sums, a, b, n, depth);
    else
        multiply_finite(sums, a, b, n, depth);
}

void multiply_narrow(float* sums, const float* a, const float* b, u32 n, u32 depth) { multiply(sums, a, b, n, depth); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) void multiply_wide(float* sums, const float* a, const float* b, u32 n, u32 depth) {
    if (depth == 8)
        multiply(sums, a, b, n, 8);
    else
        multiply(sums, a, b, n, 16);
}
const auto multiply_best = __builtin_cpu_supports("avx2") ? multiply_wide : multiply_narrow;
#else
const auto multiply_best = multiply_narrow;
#endif

// Lowest and highest shared address of an operand's chunks, checked once; the host address of shared address 0.
const u8* window_of(const Operand& operand, Site site) {
    u32 low = ~0u, high = 0;
    for (u32 outer = 0; outer < operand.outers(); ++outer)
        for (u32 inner = 0; inner < operand.inners(); ++inner) {
            const u32 address = operand.chunk_address(outer, inner);
            low = std::min(low, address);
            high = std::max(high, address);
        }
    return static_cast<const u8*>(shared_pointer(low, high - low + CHUNK, site)) - low;
}

}  // namespace

Operand::Operand(u64 descriptor, MatrixType type, bool mn_major, u32 lines)
    : start((descriptor & 0x3fff) << 4),
      leading((descriptor >> 16 & 0x3fff) << 4),
      stride((descriptor >> 32 & 0x3fff) << 4),
      swizzle_bytes(0),
      base_offset(descriptor >> 49 & 7),
      type(type),
      mn_major(mn_major),
      lines(lines) {
    static constexpr u32 SPANS[4] = {0, 128, 64, 32};
    swizzle_bytes = SPANS[descriptor >> 62];
}

u32 Operand::chunk_address(u32 outer, u32 inner) const {
    const u32 group = outer / 8, in_group = outer % 8;
    if (!swizzle_bytes) {
        const u32 along = mn_major ? leading : stride, across = mn_major ? stride : leading;
        return start + group * along + in_group * CHUNK + inner * across;
    }
    const u32 span_chunks = swizzle_bytes / CHUNK;
    const u32 across = mn_major ? inner / span_chunks * leading + inner % span_chunks * CHUNK : inner * CHUNK;
    return swizzled(start + group * stride + in_group * swizzle_bytes + across, swizzle_bytes);
}

void read_operand(const Operand& operand, float* out, u32 line_pitch, u32 k_pitch, Site site) {
    const u8* const window = window_of(operand, site);
    const u32 elements = operand.chunk_elements();
    const u32 outer_pitch = operand.mn_major ? k_pitch : line_pitch,
              inner_pitch = operand.mn_major ? line_pitch : k_pitch;
    for (u32 outer = 0; outer < operand.outers(); ++outer)
        for (u32 inner = 0; inner < operand.inners(); ++inner) {
            const u8* const chunk = window + operand.chunk_address(outer, inner);
            float* const to = out + outer * outer_pitch + inner * elements * inner_pitch;
            if (operand.type == TF32) {
                for (u32 e = 0; e < 4; ++e) to[e * inner_pitch] = element(chunk, e, TF32);
            } else {
                for (u32 e = 0; e < 8; ++e) to[e * inner_pitch] = element(chunk, e, operand.type);
            }
        }
}

void multiply_rows(float* sums, const float* a, const float* b, u32 n, u32 depth) {
    multiply_best(sums, a, b, n, depth);
}

void ChunkSet::add(const Operand& operand, u32 first_line, u32 lines) {
    if (operand.mn_major) {
        for (u32 k = 0; k < operand.depth(); ++k)
            for (u32 inner = first_line / 8; inner < (first_line + lines) / 8; ++inner)
                add(operand.chunk_address(k, inner));
        return;
    }
    for (u32 line = first_line; line < first_line + lines; ++line)
        for (u32 inner = 0; inner < 2; ++inner) add(operand.chunk_address(line, inner));
}

}  // namespace hc::emu
