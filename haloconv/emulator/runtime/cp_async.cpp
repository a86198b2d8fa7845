// cp.async: a thread's copies from global to shared memory, their groups, and arrivals that wait for them.

#include "engines.h"

namespace hc::emu {

namespace {

// A copy is finished when its thread has waited for it or a barrier has counted it, however early its bytes came: until
// then nobody may touch them.
struct Copy {
    u64 number;  // of the thread's copies, from 1
    Operation operation;
    void* to;
    u32 bytes;
    Site site;
    bool finished = false;
};

struct Arrival {
    u64 issued;  // it waits for the thread's first `issued` copies
    Operation operation;
};

struct ThreadCopies {
    std::vector<std::vector<Copy>> groups{1};  // oldest first; the last is open
    std::vector<Arrival> arrivals;             // oldest first
    u64 issued = 0;
};

std::vector<ThreadCopies> copies;

ThreadCopies& copies_of(u32 thread) {
    if (copies.size() <= thread) copies.resize(block_threads());
    return copies[thread];
}

void begin_block() { copies.clear(); }

void end_block() {
    u64 unfinished = 0;
    for (const ThreadCopies& thread : copies)
        for (const auto& group : thread.groups)
            for (const Copy& copy : group) unfinished += !copy.finished;
    if (unfinished)
        finding("unfinished copy", nullptr, "%llu cp.async copies were not waited for when the block ended",
                (unsigned long long)unfinished);
}

BlockHook hook{begin_block, end_block, nullptr};

// Arrivals that wait for none but a thread's first `issued` copies are made.
void arrive_for(const ThreadCopies& own, u64 issued) {
    for (const Arrival& arrival : own.arrivals)
        if (arrival.issued <= issued) land_now(arrival.operation);
}

// The first `issued` copies of `thread` are in place, and count as written by the barrier's engine.
void finish_for_barrier(u32 thread, u64 issued, Mbarrier& bar) {
    for (auto& group : copies_of(thread).groups)
        for (Copy& copy : group) {
            if (copy.number > issued) return;
            land_now(copy.operation);
            if (!copy.finished) engine_wrote(bar, copy.to, copy.bytes, copy.site);
            copy.finished = true;
        }
}

}  // namespace

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

void hc_emu_cp_async(void* to, const void* from, unsigned bytes, unsigned from_bytes) {
    const Site site = HC_EMU_SITE;
    if (from_bytes > bytes) fatal("cp.async", site, "%u bytes to read for a copy of %u", from_bytes, bytes);
    if ((u64)from % bytes) fatal("misaligned", site, "cp.async of %u bytes from %p", bytes, from);
    if (from_bytes) check_global(from, from_bytes, false, bytes, "cp.async", site);
    async_write_begin(to, bytes, bytes, site);
    count(ASYNC_READ_BYTES, from_bytes);
    const Operation operation = submit("cp.async", true, [=] {
        std::memcpy(to, from, from_bytes);
        std::memset(static_cast<u8*>(to) + from_bytes, 0, bytes - from_bytes);
    });
    ThreadCopies& own = copies_of(thread_id());
    own.groups.back().push_back({++own.issued, operation, to, bytes, site});
}

void hc_emu_cp_async_commit_group() { copies_of(thread_id()).groups.emplace_back(); }

void hc_emu_cp_async_wait_group(int youngest) {
    preemption_point();
    ThreadCopies& own = copies_of(thread_id());
    auto& groups = own.groups;
    const std::size_t closed = groups.size() - 1;
    const std::size_t done = closed > std::size_t(youngest) ? closed - youngest : 0;
    u64 last = 0;
    for (std::size_t i = 0; i < done; ++i)
        if (!groups[i].empty()) last = groups[i].back().number;
    if (last) arrive_for(own, last);  // what a barrier counts belongs to those who wait for it: it is told first
    for (std::size_t i = 0; i < done; ++i)
        for (const Copy& copy : groups[i]) {
            land_now(copy.operation);
            if (!copy.finished) async_write_end_by_thread(copy.to, copy.bytes, thread_id(), copy.site);
        }
    groups.erase(groups.begin(), groups.begin() + done);
}

void hc_emu_cp_async_mbarrier_arrive_noinc(void* word) {
    const Site site = HC_EMU_SITE;
    Mbarrier& bar = mbarrier_at(word, site);
    // The arrival carries the copies alone: what else the thread wrote is not released by it. It waits for more of them
    // than the thread's earlier arrivals, and so comes behind those.
    ThreadCopies& own = copies_of(thread_id());
    const auto earlier = own.arrivals.size();
    const Operation operation =
        submit("cp.async.mbarrier.arrive", true, [=, &bar, thread = thread_id(), issued = own.issued] {
            if (earlier) land_now(copies_of(thread).arrivals[earlier - 1].operation);
            finish_for_barrier(thread, issued, bar);
            arrive_with(bar, Clock{}, site);
        });
    own.arrivals.push_back({own.issued, operation});
    preemption_point();
}

}  // extern "C"
