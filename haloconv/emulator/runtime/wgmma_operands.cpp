// wgmma's operands, decoded bit by bit, and its product.
//
// Addresses are formed without the swizzle and then swizzled as a whole, so that a tile may start at any of its rows.

#pragma GCC optimize("fp-contract=fast")  // products are exact, so fusing changes no result, only speed

#include <algorithm>

#include "wgmma.h"

namespace hc::emu {

namespace {

constexpr u32 CHUNK = 16;

using Vector = float __attribute__((vector_size(32)));  // 8 floats

// Four rows by 8 * VECTORS columns at a time, sums in registers.
template <u32 VECTORS>
inline __attribute__((always_inline)) void multiply_block(float* sums, const float* a, const float* b, u32 n,
                                                          u32 depth) {
    for (u32 row = 0; row < 16; row += 4)
        for (u32 col = 0; col < n; col += 8 * VECTORS) {
            Vector sum[4][VECTORS];
            for (u32 i = 0; i < 4; ++i)
                for (u32 v = 0; v < VECTORS; ++v)
                    std::memcpy(&sum[i][v], sums + (row + i) * n + col + 8 * v, sizeof(Vector));
            for (u32 k = 0; k < depth; ++k)
                for (u32 v = 0; v < VECTORS; ++v) {
                    Vector right;
                    std::memcpy(&right, b + k * n + col + 8 * v, sizeof right);
                    for (u32 i = 0; i < 4; ++i) sum[i][v] += a[(row + i) * depth + k] * right;
                }
            for (u32 i = 0; i < 4; ++i)
                for (u32 v = 0; v < VECTORS; ++v)
                    std::memcpy(sums + (row + i) * n + col + 8 * v, &sum[i][v], sizeof(Vector));
        }
}

#if defined(__x86_64__)
#define HC_EMU_FMA __attribute__((target("avx2,fma")))
HC_EMU_FMA void multiply_wide(float* sums, const float* a, const float* b, u32 n, u32 depth) {
    multiply_block<2>(sums, a, b, n, depth);
}
HC_EMU_FMA void multiply_narrow(float* sums, const float* a, const float* b, u32 n, u32 depth) {
    multiply_block<1>(sums, a, b, n, depth);
}
const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
const bool has_fma = false;
void multiply_wide(float*, const float*, const float*, u32, u32) {}
void multiply_narrow(float*, const float*, const float*, u32, u32) {}
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
    if (has_fma)
        n % 16 ? multiply_narrow(sums, a, b, n, depth) : multiply_wide(sums, a, b, n, depth);
    else
        multiply_block<1>(sums, a, b, n, depth);
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
