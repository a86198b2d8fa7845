// The shadow's rare paths, and the accesses of wrappers and asynchronous engines.
#include "shadow.h"

namespace hc::emu {

namespace core {

Word shadow[MAX_SHARED_BYTES / 4];

namespace {

std::string name_of(u32 agent) {
    if (agent < launch.threads) return "thread " + std::to_string(agent) + " (warp " + std::to_string(agent / 32) + ")";
    return "an asynchronous copy";
}

}  // namespace

void report_race(const char* what, const char* before, u32 epoch, u64 address, Site site) {
    finding("race", site, "this %s of %s is not ordered after the %s by %s", what, place_of(address).c_str(), before,
            name_of(agent_of(epoch)).c_str());
}

namespace {

// What stands in the way of an access, other than order.
void check_state(const Word& word, u32 halves, bool write, u64 address, Site site) {
    if (word.state & RESERVED)
        finding("barrier overwritten", site, "this %s of %s touches a barrier object", write ? "write" : "read",
                place_of(address).c_str());
    if (word.state & WRITE_IN_FLIGHT)
        finding("copy in flight", site, "this %s of %s meets bytes that an asynchronous copy is still to write",
                write ? "write" : "read", place_of(address).c_str());
    if (write && word.reads_in_flight)
        finding("read in flight", site, "this write of %s meets bytes that an asynchronous operation is still to read",
                place_of(address).c_str());
    if (!write && !(word.state & WRITE_IN_FLIGHT) && (word.state & halves))
        finding("unwritten", site, "%s is read and nothing has written it in this block", place_of(address).c_str());
}

void note_read(Word& word, u32 reader_epoch, u32 slot, u32 halves) {
    constexpr u32 WHO = (1u << HALVES_SHIFT) - 1;
    u32& cell = word.reads[slot];
    const u32 mine = (reader_epoch & WHO) | halves << HALVES_SHIFT;
    const bool again = (word.read_mask >> slot & 1) && (cell & WHO) == (mine & WHO);
    cell = again ? cell | mine : mine;
    word.read_mask |= (u8)(1u << slot);
}

void note_write(Word& word, u32 writer_epoch, u32 halves) {
    for (u32 half = 0; half < 2; ++half)
        if (halves >> half & 1) word.write[half] = writer_epoch;
    word.state &= (u8)~halves;
    if (halves == 3) {
        word.read_mask = 0;
    } else {
        for (u32 slots = word.read_mask; slots; slots &= slots - 1) {
            u32& read = word.reads[__builtin_ctz(slots)];
            read &= ~(halves << HALVES_SHIFT);
        }
    }
}

}  // namespace

void read_word_slowly(Word& word, u32 halves, u64 address, Site site) {
    check_state(word, halves, false, address, site);
    check_order_after_writes(word, halves, "read", address, site);
    note_read(word, fast.epoch, fast.slot, halves);
    word.state &= (u8)~halves;  // said once
}

void write_word_slowly(Word& word, u32 halves, u64 address, Site site) {
    check_state(word, halves, true, address, site);
    check_order_after_writes(word, halves, "write", address, site);
    check_order_after_reads(word, halves, address, site);
    note_write(word, fast.epoch, halves);
}

void begin_block_shadow(u64 words) {
    Word fresh{};
    fresh.state = UNWRITTEN;
    for (u64 i = 0; i < words; ++i) shadow[i] = fresh;
}

}  // namespace core

using namespace core;

namespace {

Word* checked_words(const void* pointer, u32 bytes, u32 align, bool write, Site site) {
    const u64 address = (u64)pointer;
    check_time();
    check_alignment(address, bytes, align, write, site);
    if (!in_block_memory(address, bytes))
        fatal("out of bounds", site, "this %s of %u bytes is not inside the block's shared memory: %s",
              write ? "write" : "read", bytes, whereabouts(address).c_str());
    return shadow_of(address);
}

template <class Do>
void for_words(const void* pointer, u32 bytes, Do each) {
    u64 address = (u64)pointer;
    Word* word = shadow_of(address);
    for (u64 next, end = address + bytes; address < end; address = next, ++word) {
        const u32 halves = halves_in(address, end, next);
        each(*word, halves, address);
    }
}

}  // namespace

void shared_read(const void* from, u32 bytes, u32 align, Site site) {
    Word* words = checked_words(from, bytes, align, false, site);
    if (launch.statistics) count_access((u64)from, bytes, false, true, site);
    access_words<false>(words, (u64)from, bytes, site);
}

void shared_write(void* to, u32 bytes, u32 align, Site site) {
    Word* words = checked_words(to, bytes, align, true, site);
    if (launch.statistics) count_access((u64)to, bytes, true, true, site);
    access_words<true>(words, (u64)to, bytes, site);
}

void async_read_begin(const void* from, u32 bytes, u32 align, bool proxy, Site site) {
    checked_words(from, bytes, align, false, site);
    for_words(from, bytes, [&](Word& word, u32 halves, u64 address) {
        if (HC_UNLIKELY(word.state)) check_state(word, halves, false, address, site);
        check_order_after_writes(word, halves, "asynchronous read", address, site);
        if (word.reads_in_flight < 255) ++word.reads_in_flight;
        if (!proxy) return;
        for (u32 half = 0; half < 2; ++half) {
            const u32 write = word.write[half], writer = agent_of(write);
            if (!(halves >> half & 1) || writer >= launch.threads) continue;
            if (HC_LIKELY((write & CLOCK_MASK) <= threads[writer].fence_clock)) continue;
            finding("proxy", site, "%s was written by %s, which has executed no fence.proxy.async since",
                    place_of(address).c_str(), name_of(writer).c_str());
        }
    });
}

void async_read_end(const void* from, u32 bytes, u32 reader_thread, Site) {
    const u32 reader = epoch(reader_thread, threads[reader_thread].clock[reader_thread], 3);
    const u32 slot = reader_thread / 32 % READ_SLOTS;
    for_words(from, bytes, [&](Word& word, u32 halves, u64) {
        if (word.reads_in_flight) --word.reads_in_flight;
        note_read(word, reader, slot, halves);
    });
}

void async_write_begin(void* to, u32 bytes, u32 align, Site site) {
    checked_words(to, bytes, align, true, site);
    for_words(to, bytes, [&](Word& word, u32 halves, u64 address) {
        if (HC_UNLIKELY((word.state & ~UNWRITTEN) || word.reads_in_flight))
            check_state(word, halves, true, address, site);
        check_order_after_writes(word, halves, "asynchronous write", address, site);
        check_order_after_reads(word, halves, address, site);
        word.state |= WRITE_IN_FLIGHT;
    });
}

void async_write_end(void* to, u32 bytes, u32 agent, Site) {
    const u32 writer = epoch(launch.threads + agent, agent_tick(agent), 0);
    for_words(to, bytes, [&](Word& word, u32 halves, u64) {
        word.state &= (u8)~WRITE_IN_FLIGHT;
        note_write(word, writer, halves);
    });
}

void async_write_end_by_thread(void* to, u32 bytes, u32 thread, Site) {
    const u32 writer = epoch(thread, threads[thread].clock[thread], 0);
    for_words(to, bytes, [&](Word& word, u32 halves, u64) {
        word.state &= (u8)~WRITE_IN_FLIGHT;
        note_write(word, writer, halves);
    });
}

void reserve_shared(const void* word, u32 bytes, const char*) {
    checked_words(word, bytes, 8, true, nullptr);
    for_words(word, bytes, [](Word& each, u32, u64) { each.state = (each.state & ~UNWRITTEN) | RESERVED; });
}

void unreserve_shared(const void* word, u32 bytes) {
    for_words(word, bytes, [](Word& each, u32, u64) { each.state &= (u8)~RESERVED; });
}

}  // namespace hc::emu
