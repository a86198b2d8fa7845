// The shadow of shared memory: per 4-byte word the last writers and readers, and what is still to happen to it.
//
// Inline because each access of a kernel comes through here; what is rare is in shadow.cpp.
#pragma once

#include "core.h"

namespace hc::emu::core {

extern Word shadow[MAX_SHARED_BYTES / 4];  // by address in the shared window, from WINDOW_BASE on

constexpr u8 UNWRITTEN = UNWRITTEN_LOW | UNWRITTEN_HIGH;

void read_word_slowly(Word& word, u32 halves, u64 address, Site site);
void write_word_slowly(Word& word, u32 halves, u64 address, Site site);
void report_race(const char* what, const char* before, u32 epoch, u64 address, Site site);

// The halves of its word that [address, end) covers, and the next word's address.
inline u32 halves_in(u64 address, u64 end, u64& next) {
    const u64 word = address & ~3ull;
    next = word + 4;
    const u64 last = end < next ? end : next;
    return (address < word + 2 ? 1u : 0u) | (last > word + 2 ? 2u : 0u);
}

inline void check_order_after_writes(const Word& word, u32 halves, const char* what, u64 address, Site site) {
    for (u32 half = 0; half < 2; ++half)
        if ((halves >> half & 1) && HC_UNLIKELY(!ordered(fast.clock, word.write[half])))
            return report_race(what, "write", word.write[half], address, site);
}

inline void check_order_after_reads(const Word& word, u32 halves, u64 address, Site site) {
    for (u32 slots = word.read_mask; slots; slots &= slots - 1) {
        const u32 read = word.reads[__builtin_ctz(slots)];
        if ((read >> HALVES_SHIFT & halves) && HC_UNLIKELY(!ordered(fast.clock, read)))
            return report_race("write", "read", read, address, site);
    }
}

inline void read_word(Word& word, u64 address, Site site) {
    if (HC_UNLIKELY(word.state || !ordered(fast.clock, word.write[0]) || !ordered(fast.clock, word.write[1])))
        return read_word_slowly(word, 3, address, site);
    word.reads[fast.slot] = fast.epoch;
    word.read_mask |= (u8)(1u << fast.slot);
}

inline void write_word(Word& word, u64 address, Site site) {
    if (HC_UNLIKELY(word.state & ~UNWRITTEN) || HC_UNLIKELY(word.reads_in_flight) ||
        HC_UNLIKELY(!ordered(fast.clock, word.write[0]) || !ordered(fast.clock, word.write[1])))
        return write_word_slowly(word, 3, address, site);
    if (word.read_mask) check_order_after_reads(word, 3, address, site);
    word.write[0] = word.write[1] = fast.epoch;
    word.read_mask = word.state = 0;
}

template <bool WRITE>
void access_words(Word* word, u64 address, u64 bytes, Site site) {
    const u64 end = address + bytes;
    for (u64 next; address < end; address = next, ++word) {
        const u32 halves = halves_in(address, end, next);
        if (halves == 3)
            WRITE ? write_word(*word, address, site) : read_word(*word, address, site);
        else
            WRITE ? write_word_slowly(*word, halves, address, site) : read_word_slowly(*word, halves, address, site);
    }
}

}  // namespace hc::emu::core
