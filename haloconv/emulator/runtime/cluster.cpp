// Clusters: blocks that read one another's shared memory between two cluster barriers.
//
// Blocks run one after another, so a cluster runs twice. The first time each block stops at its first cluster barrier,
// and its shared memory is kept. The second time each runs to its end: between its barriers it reads what was kept of
// its peers. What a peer may still change by then, or has not written, is a finding. Not taken: writes to a peer's
// memory, more than two cluster barriers, and atomic operations on global memory before the first one, which would
// count twice.
#include <cstring>

#include "polls.h"
#include "shadow.h"

namespace hc::emu {

namespace core {

namespace {

constexpr u32 MOST_BARRIERS = 2;

// The shared memory of a block at its first cluster barrier, by offset in the shared window.
struct Kept {
    std::vector<char> bytes;
    std::vector<Word> words;
    Clock clock;                         // of all that the barrier orders
    Clock clock_again;                   // the same in the second run
    std::vector<u8> read_by, rewritten;  // words: by a peer; by the block behind the first barrier
    u32 barriers = 0;                    // that the block has met
};
std::vector<Kept> kept;
bool keeps;  // the first of the two runs

struct {
    u32 arrived = 0, round = 0;
    Clock gathering, met;
    WaitList waiters;
} barrier;

std::string describe_barrier(const void*) {
    return std::to_string(barrier.arrived) + " of " + std::to_string(launch.alive) + " threads have arrived";
}

u32 own_rank() { return (u32)(launch.block % launch.request.cluster); }

std::string place_in_peer(u64 address, u32 rank) {
    const u64 window = WINDOW_BASE + (address - (u64)kept[rank].bytes.data());
    char text[80];
    snprintf(text, sizeof text, "shared address 0x%llx of block %u of the cluster", (unsigned long long)window, rank);
    return text;
}

void keep_block() {
    Kept& own = kept[own_rank()];
    copy_window(own.bytes.data());
    std::copy(shadow, shadow + own.words.size(), own.words.begin());
    own.clock = barrier.met;
    own.barriers = 1;
}

// Words that the block has written since its first barrier: peers may read them until it meets the second one.
void note_rewritten() {
    Kept& own = kept[own_rank()];
    for (size_t i = 0; i < own.rewritten.size(); ++i)
        for (const u32 write : shadow[i].write) own.rewritten[i] |= !ordered(own.clock_again.entries.data(), write);
}

void open_barrier() {
    ++barrier.round;
    barrier.arrived = 0;
    barrier.met = barrier.gathering;
    barrier.gathering = {};
    if (keeps) {
        keep_block();
        leave_block();
    }
    Kept& own = kept[own_rank()];
    own.barriers = barrier.round;
    if (barrier.round == 1) own.clock_again = barrier.met;
    if (barrier.round == MOST_BARRIERS) note_rewritten();
    notify_all(barrier.waiters);
}

void open_barrier_if_complete() {
    if (barrier.arrived > 0 && barrier.arrived == launch.alive) open_barrier();
}

bool is_readable(const Kept& peer, const Word& word, u32 halves) {
    bool known = true;
    for (u32 half = 0; half < 2; ++half)
        known &= !(halves >> half & 1) || ordered(peer.clock.entries.data(), word.write[half]);
    return known && !(word.state & (RESERVED | WRITE_IN_FLIGHT | halves));
}

void report_peer_word(const Word& word, u32 halves, u64 address, u32 rank, Site site) {
    const std::string place = place_in_peer(address, rank);
    if (word.state & RESERVED)
        finding("barrier overwritten", site, "this read of %s touches a barrier object", place.c_str());
    else if (word.state & WRITE_IN_FLIGHT)
        finding("copy in flight", site, "this read of %s meets bytes that an asynchronous copy is still to write",
                place.c_str());
    else if (word.state & halves)
        finding("unwritten", site, "%s is read and its block has not written it", place.c_str());
    else
        finding("race", site, "this read of %s is not ordered after the write there by a cluster barrier",
                place.c_str());
}

}  // namespace

void begin_launch_clusters() {
    kept.clear();
    if (launch.request.cluster > 1) kept.resize(launch.request.cluster);
}

void begin_cluster() {
    const u64 words = (shared_window_bytes() + 3) / 4;
    for (Kept& each : kept) {
        each = {};
        each.bytes.resize(words * 4);
        each.words.resize(words);
        each.read_by.assign(words, 0);
        each.rewritten.assign(words, 0);
    }
}

void begin_block_cluster(bool first_run) {
    keeps = first_run;
    barrier = {};
}

void end_block_cluster() {
    if (kept.empty()) return;
    if (barrier.arrived)
        finding("barrier", nullptr, "%s at a cluster barrier when the block ended", describe_barrier(nullptr).c_str());
    if (barrier.round == 1) note_rewritten();
}

void end_cluster() {
    for (u32 rank = 0; rank < kept.size(); ++rank) {
        const Kept& own = kept[rank];
        for (size_t i = 0; i < own.words.size(); ++i) {
            if (!own.read_by[i]) continue;
            const std::string place = place_in_peer((u64)own.bytes.data() + 4 * i, rank);
            if (own.rewritten[i])
                finding("race", nullptr,
                        "%s is written behind the cluster barrier, and read by a peer that may come later",
                        place.c_str());
            if (own.barriers < MOST_BARRIERS)
                finding("barrier", nullptr,
                        "%s is read by a peer, and its block may have left: it meets no second cluster barrier",
                        place.c_str());
            if (own.rewritten[i] || own.barriers < MOST_BARRIERS) break;
        }
    }
}

void thread_left_cluster() { open_barrier_if_complete(); }

bool runs_again() { return keeps; }

bool in_peer_memory(u64 address) {
    for (const Kept& each : kept)
        if (address - (u64)each.bytes.data() < each.bytes.size()) return true;
    return false;
}

void peer_access(u64 address, u64 bytes, bool write, Site site) {
    u32 rank = 0;
    while (address - (u64)kept[rank].bytes.data() >= kept[rank].bytes.size()) ++rank;
    Kept& peer = kept[rank];
    const u64 offset = address - (u64)peer.bytes.data();
    if (write)
        fatal("cluster", site, "this write goes to %s: the emulator takes reads of peers alone",
              place_in_peer(address, rank).c_str());
    if (offset + bytes > peer.bytes.size())
        fatal("out of bounds", site, "this read of %llu bytes goes beyond %s", (unsigned long long)bytes,
              place_in_peer(address, rank).c_str());
    if (barrier.round == 0 || peer.barriers == 0)
        fatal("race", site, "this read of %s comes before a cluster barrier", place_in_peer(address, rank).c_str());
    if (barrier.round == MOST_BARRIERS)
        fatal("race", site, "this read of %s comes after the last cluster barrier: the block may have left",
              place_in_peer(address, rank).c_str());
    u64 at = address;
    for (u64 next, end = address + bytes, i = offset / 4; at < end; at = next, ++i) {
        const u32 halves = halves_in(at, end, next);
        if (HC_UNLIKELY(!is_readable(peer, peer.words[i], halves)))
            report_peer_word(peer.words[i], halves, at, rank, site);
        peer.read_by[i] = 1;
    }
}

}  // namespace core

using namespace core;

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

unsigned hc_emu_cluster_rank() { return launch.request.cluster < 2 ? 0 : own_rank(); }

void hc_emu_cluster_sync() {
    const Site site = HC_EMU_SITE;
    if (kept.empty()) return;  // a block is its own cluster
    if (barrier.round == MOST_BARRIERS)
        fatal("cluster", site, "the emulator takes %u cluster barriers of a launch at most", MOST_BARRIERS);
    ++barrier.arrived;
    note_change();
    release(barrier.gathering);
    const u32 round = barrier.round;
    open_barrier_if_complete();
    wait_until(barrier.waiters, {"barrier.cluster", site, describe_barrier, nullptr},
               [&] { return barrier.round != round; });
    acquire(barrier.met);
    preemption_point();
}

const void* hc_emu_peer_shared(const void* smem, unsigned rank) {
    const Site site = HC_EMU_SITE;
    const u32 window = shared_address(smem, site);
    if (rank >= (kept.empty() ? 1 : launch.request.cluster))
        fatal("cluster", site, "block %u of a cluster of %llu", rank, (unsigned long long)launch.request.cluster);
    if (rank == hc_emu_cluster_rank()) return smem;
    return kept[rank].bytes.data() + (window - WINDOW_BASE);
}
}
