// What the runtime sources of the asynchronous primitives share: barriers that engines complete, meetings of a warp,
// and number formats. Internal to runtime/*.cpp.
#pragma once

#include <cstring>

#include "runtime.h"

namespace hc::emu {

// ---- Mbarriers ----

struct Mbarrier;

// The initialised barrier at `word`; ends the run if there is none. Reports a use that is not ordered after the init.
Mbarrier& mbarrier_at(const void* word, Site site);

// The same, for an engine that will complete bytes on it: the init must be fenced for the asynchronous proxy.
Mbarrier& mbarrier_of_engine(const void* word, Site site);

// An engine wrote [to, to + bytes) of shared memory for this barrier: who waits for the phase sees it.
void engine_wrote(Mbarrier& bar, void* to, u32 bytes, Site site);

// `bytes` of the phase's expected bytes have come.
void complete_bytes(Mbarrier& bar, u32 bytes, Site site);

// One arrival that carries all that is in `clock` and all that the barrier's engine wrote.
void arrive_with(Mbarrier& bar, const Clock& clock, Site site);

// Copies to shared memory under way in this block; what is left at its end nobody waited for.
void copy_begins();
void copy_ends();

// ---- Warps ----

inline u32 lane_id() { return thread_id() % 32; }
inline u32 warp_id() { return thread_id() / 32; }
u32 warp_threads();  // threads of this thread's warp: 32, or fewer in the last

// The lanes of the current thread's warp meet for the collective `what`; the last to come runs `once`. Ends the run if
// some of them meet for another one.
void meet_warp(const char* what, Site site, const std::function<void()>& once);

// ---- Numbers ----

inline float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float float_of_tf32(u32 bits) { return float_of(bits & 0xffffe000u); }
inline float float_of_bf16(u16 bits) { return float_of(u32(bits) << 16); }
float float_of_fp16(u16 bits);

enum MatrixType : int { TF32, FP16, BF16 };

// Element `index` of packed 16-bit elements, or of 32-bit TF32 words.
float element(const void* packed, u32 index, MatrixType type);

// The place of a shared address under a swizzle of 128, 64 or 32 bytes; 0 leaves it.
inline u32 swizzled(u32 address, u32 swizzle_bytes) {
    return address ^ ((address >> 3) & (swizzle_bytes == 128  ? 0x70u
                                        : swizzle_bytes == 64 ? 0x30u
                                        : swizzle_bytes == 32 ? 0x10u
                                                              : 0u));
}

}  // namespace hc::emu
