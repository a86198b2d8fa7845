// The arithmetic of wgmma: descriptors, where operands lie in shared memory, the product. Internal to runtime/*.cpp.
#pragma once

#include "engines.h"

namespace hc::emu {

// One operand: `lines` rows of a (or columns of b) by one instruction's depth of k, as a descriptor places it.
struct Operand {
    u32 start, leading, stride;  // bytes
    u32 swizzle_bytes;           // 128, 64, 32 or 0
    u32 base_offset;
    MatrixType type;
    bool mn_major;
    u32 lines;

    Operand(u64 descriptor, MatrixType type, bool mn_major, u32 lines);

    u32 depth() const { return type == TF32 ? 8 : 16; }
    u32 chunk_elements() const { return type == TF32 ? 4 : 8; }

    // Shared address of a 16-byte chunk. K-major: line `outer`, k from chunk_elements() * inner. MN-major: k `outer`,
    // lines from 8 * inner.
    u32 chunk_address(u32 outer, u32 inner) const;
    u32 outers() const { return mn_major ? depth() : lines; }
    u32 inners() const { return mn_major ? (lines + 7) / 8 : 2; }
};

// Reads an operand as floats: element (line, k) goes to out[line * line_pitch + k * k_pitch].
void read_operand(const Operand& operand, float* out, u32 line_pitch, u32 k_pitch, Site site);

// sums[16][n] += a[16][depth] * b[depth][n], all row-major, as sm_90 adds: the exact products and the sum before are cut
// toward zero behind the bits that the largest of them allows, added, and the result is cut to fp32.
void multiply_rows(float* sums, const float* a, const float* b, u32 n, u32 depth);

// Which 16-byte chunks of the shared window are touched; merged into ranges when walked.
class ChunkSet {
  public:
    void add(u32 address) { words_[address / 1024 % WORDS] |= u64(1) << (address / 16 % 64); }
    void add(const Operand& operand, u32 first_line, u32 lines);

    // Calls visit(address, bytes) for each maximal range.
    template <class Visit>
    void for_each_range(Visit visit) const {
        const u32 chunks = WORDS * 64;
        for (u32 at = 0; at < chunks;) {
            if (!words_[at / 64]) {
                at = (at / 64 + 1) * 64;
                continue;
            }
            if (!has(at)) {
                ++at;
                continue;
            }
            u32 end = at + 1;
            while (end < chunks && has(end)) ++end;
            visit(at * 16, (end - at) * 16);
            at = end;
        }
    }

  private:
    static constexpr u32 WORDS = 256;  // 256 KiB, all that a descriptor can address
    bool has(u32 chunk) const { return words_[chunk / 64] >> (chunk % 64) & 1; }
    u64 words_[WORDS] = {};
};

}  // namespace hc::emu
