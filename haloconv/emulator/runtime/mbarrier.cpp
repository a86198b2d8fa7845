// mbarrier: phases, pending arrivals and transaction bytes; the happens-before edges through it.

#include <cstdarg>
#include <cstdio>
#include <map>
#include <memory>

#include "engines.h"
#include "polls.h"

namespace hc::emu {

struct Mbarrier {
    const void* word = nullptr;
    u32 expected = 0;            // arrivals that end a phase
    std::int64_t pending = 0;    // arrivals still to come in this phase
    std::int64_t bytes = 0;      // expected and not yet completed; below zero if completed first
    u64 phase = 0;               // phases ended
    Clock gathering, completed;  // what the arrivals of this phase, and of the one before, carried
    std::map<std::pair<u32, Site>, core::Poll> polls;  // by warp and place
    u32 agent = 0;                                     // the engines that complete on it
    u32 init_thread = 0, init_time = 0;
    bool fenced = false;        // the init is visible to engines
    std::vector<bool> seen_by;  // threads whose order after the init was checked
    std::vector<u32> arrived;   // by thread, in this phase, for the report
};

namespace {

constexpr std::int64_t BYTES_LIMIT = (1 << 20) - 1;  // of the hardware's counter
constexpr u32 ARRIVALS_LIMIT = (1 << 20) - 1;

std::map<const void*, std::unique_ptr<Mbarrier>> barriers;
u64 copies_under_way = 0;

u32 own_time() {
    Clock clock;
    clock_of(self(), clock);
    return thread_id() < clock.entries.size() ? clock.entries[thread_id()] : 0;
}

u32 time_known_of(u32 thread) {
    Clock clock;
    clock_of(self(), clock);
    return thread < clock.entries.size() ? clock.entries[thread] : 0;
}

std::string describe(const void* object) {
    const Mbarrier& bar = *static_cast<const Mbarrier*>(object);
    char text[200];
    std::snprintf(text, sizeof text,
                  "mbarrier at shared 0x%x: phase %llu (parity %llu), %lld of %u arrivals and %lld bytes to come",
                  shared_address(bar.word, nullptr), (unsigned long long)bar.phase, (unsigned long long)(bar.phase & 1),
                  (long long)bar.pending, bar.expected, (long long)bar.bytes);
    return text;
}

void end_phase_if_complete(Mbarrier& bar, Site site) {
    if (bar.pending != 0) return;
    if (bar.bytes < 0) {
        finding("mbarrier", site, "%s: all arrived, but %lld bytes more came than the phase expects; it never ends",
                describe(&bar).c_str(), (long long)-bar.bytes);
        return;
    }
    if (bar.bytes != 0) return;
    ++bar.phase;
    bar.pending = bar.expected;
    bar.completed = bar.gathering;
    bar.gathering.entries.clear();
    for (auto& [whose, poll] : bar.polls) notify_all(poll.waiters);
}

void expect_bytes(Mbarrier& bar, u32 bytes, Site site) {
    core::note_change();
    bar.bytes += bytes;
    if (bytes > BYTES_LIMIT || bar.bytes > BYTES_LIMIT)
        finding("mbarrier", site, "%s: a phase counts at most %lld bytes", describe(&bar).c_str(),
                (long long)BYTES_LIMIT);
}

void arrive(Mbarrier& bar, Site site) {
    core::note_change();
    if (bar.pending == 0) {
        finding("mbarrier", site, "%s: one arrival more than it expects in a phase", describe(&bar).c_str());
        return;
    }
    --bar.pending;
    end_phase_if_complete(bar, site);
}

// Barriers live in 8-byte words of shared memory.
void check_word(const void* word, Site site) {
    if (!is_shared(word)) fatal("mbarrier", site, "the barrier at %p is not in shared memory", word);
    if ((u64)word % 8)
        fatal("mbarrier", site, "the barrier at shared 0x%x is not 8-byte aligned", shared_address(word, site));
}

void begin_block() {
    barriers.clear();
    copies_under_way = 0;
}

void end_block() {
    if (copies_under_way)
        finding("unfinished copy", nullptr,
                "%llu copies to shared memory were still under way when the block ended: nobody waited for them",
                (unsigned long long)copies_under_way);
    for (const auto& [word, bar] : barriers)
        if (bar->bytes != 0) finding("mbarrier", nullptr, "%s, when the block ended", describe(bar.get()).c_str());
}

std::string report() {
    std::string text;
    for (const auto& [word, bar] : barriers) text += describe(bar.get()) + "\n";
    return text;
}

BlockHook hook{begin_block, end_block, report};

}  // namespace

Mbarrier& mbarrier_at(const void* word, Site site) {
    const auto found = barriers.find(word);
    if (found == barriers.end()) {
        check_word(word, site);
        fatal("mbarrier", site, "no barrier was initialised at shared 0x%x", shared_address(word, site));
    }
    Mbarrier& bar = *found->second;
    const u32 thread = thread_id();
    if (bar.seen_by.size() <= thread) bar.seen_by.resize(thread + 1);
    if (!bar.seen_by[thread]) {
        bar.seen_by[thread] = true;
        if (time_known_of(bar.init_thread) < bar.init_time)
            finding("race", site, "%s: its init by thread %u is not ordered before this use", describe(&bar).c_str(),
                    bar.init_thread);
    }
    return bar;
}

Mbarrier& mbarrier_of_engine(const void* word, Site site) {
    Mbarrier& bar = mbarrier_at(word, site);
    if (!bar.fenced)
        finding("missing fence", site,
                "%s: the init was not followed by fence.mbarrier_init (or fence.proxy.async) in its thread",
                describe(&bar).c_str());
    return bar;
}

void engine_wrote(Mbarrier& bar, void* to, u32 bytes, Site site) {
    async_write_end(to, bytes, bar.agent, site);
    release_agent(bar.gathering, bar.agent);
}

void complete_bytes(Mbarrier& bar, u32 bytes, Site site) {
    bar.bytes -= bytes;
    if (bar.bytes < -BYTES_LIMIT)
        finding("mbarrier", site, "%s: a phase counts at most %lld bytes", describe(&bar).c_str(),
                (long long)BYTES_LIMIT);
    end_phase_if_complete(bar, site);
}

void arrive_with(Mbarrier& bar, const Clock& clock, Site site) {
    merge(bar.gathering, clock);
    arrive(bar, site);
}

void copy_begins() { ++copies_under_way; }
void copy_ends() { --copies_under_way; }

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

void hc_emu_mbarrier_init(void* word, unsigned arrivals) {
    const Site site = HC_EMU_SITE;
    check_word(word, site);
    if (arrivals == 0 || arrivals > ARRIVALS_LIMIT)
        fatal("mbarrier", site, "a barrier expects 1 to %u arrivals, not %u", ARRIVALS_LIMIT, arrivals);
    const auto found = barriers.find(word);
    if (found != barriers.end())
        fatal("mbarrier", site, "%s: initialised again without mbarrier.inval", describe(found->second.get()).c_str());
    shared_write(word, 8, 8, site);
    auto bar = std::make_unique<Mbarrier>();
    bar->word = word;
    bar->expected = arrivals;
    bar->pending = arrivals;
    bar->agent = new_agent();
    bar->init_thread = thread_id();
    bar->init_time = own_time();
    reserve_shared(word, 8, "an mbarrier");
    barriers[word] = std::move(bar);
}

void hc_emu_fence_mbarrier_init() {
    for (const auto& [word, bar] : barriers)
        if (bar->init_thread == thread_id()) bar->fenced = true;
}

void hc_emu_fence_proxy_async() {
    fence_proxy_async();
    hc_emu_fence_mbarrier_init();
}

void hc_emu_mbarrier_arrive(void* word) {
    const Site site = HC_EMU_SITE;
    Mbarrier& bar = mbarrier_at(word, site);
    release(bar.gathering);
    arrive(bar, site);
    preemption_point();
}

void hc_emu_mbarrier_arrive_expect_tx(void* word, unsigned bytes) {
    const Site site = HC_EMU_SITE;
    Mbarrier& bar = mbarrier_at(word, site);
    expect_bytes(bar, bytes, site);
    release(bar.gathering);
    arrive(bar, site);
    preemption_point();
}

void hc_emu_mbarrier_expect_tx(void* word, unsigned bytes) {
    const Site site = HC_EMU_SITE;
    expect_bytes(mbarrier_at(word, site), bytes, site);
    preemption_point();
}

bool hc_emu_mbarrier_try_wait_parity(void* word, unsigned parity) {
    const Site site = HC_EMU_SITE;
    preemption_point();
    Mbarrier& bar = mbarrier_at(word, site);
    if (parity > 1) fatal("mbarrier", site, "%s: a parity is 0 or 1, not %u", describe(&bar).c_str(), parity);
    const auto ended = [&] { return (bar.phase & 1) != parity; };
    core::Poll& poll = bar.polls[{warp_id(), site}];
    const u64 round = core::join(poll, ended());
    const WaitReason reason{parity ? "the end of a phase of parity 1" : "the end of a phase of parity 0", site,
                            describe, &bar};
    while (!core::is_refused(poll, round)) {
        if (!ended()) {
            core::wait_in(poll, reason);
            continue;
        }
        acquire(bar.completed);
        return true;
    }
    return false;
}

void hc_emu_mbarrier_inval(void* word) {
    const Site site = HC_EMU_SITE;
    Mbarrier& bar = mbarrier_at(word, site);
    for (auto& [whose, poll] : bar.polls) {
        if (poll.inside) fatal("mbarrier", site, "%s: invalidated while threads wait", describe(&bar).c_str());
        core::forget(poll);
    }
    if (bar.pending != bar.expected || bar.bytes != 0)
        finding("mbarrier", site, "%s: invalidated while in use", describe(&bar).c_str());
    unreserve_shared(word, 8);
    barriers.erase(word);
}

}  // extern "C"
