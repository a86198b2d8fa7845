// Barriers of the block, meetings of warps and warpgroups, shuffles, votes, and atomic operations.
#include <cstring>
#include <memory>

#include "core.h"
#include "polls.h"

namespace hc::emu {

namespace core {

namespace {

enum Kind : u32 { SYNC, BALLOT, SHUFFLE, KINDS };
constexpr const char* NAMES[KINDS] = {"__syncwarp", "a vote", "a shuffle"};

// A collective that some lanes of a warp have reached. Only __syncwarp orders memory: the language gives votes and
// shuffles no such effect, whatever lanes run together.
struct WarpMeeting {
    Kind kind;
    u32 mask, arrived;
    u64 values[32];
    Clock clock;  // of the lanes' accesses before a __syncwarp
    WaitList waiters;
};
std::vector<std::unique_ptr<WarpMeeting>> warps[MAX_THREADS / 32];

Meeting warpgroups[MAX_THREADS / 128];

Clock atomics;

struct BlockBarrier {
    u32 arrived = 0, trues = 0, last_trues = 0;
    Site site = nullptr;        // where the first thread waits
    Site other_site = nullptr;  // where another one does; Python drops what is the same line
    u64 generation = 0;
    WaitList waiters;
    std::vector<u32> threads;
} block_barrier;

std::string describe_warp_meeting(const void* object) {
    const auto& meeting = *static_cast<const WarpMeeting*>(object);
    char text[80];
    snprintf(text, sizeof text, "mask 0x%08x, arrived 0x%08x", meeting.mask, meeting.arrived);
    return text;
}

std::string describe_block_barrier(const void*) {
    return std::to_string(block_barrier.arrived) + " of " + std::to_string(launch.alive) + " threads have arrived";
}

std::string describe_meeting(const void* object) {
    return std::to_string(static_cast<const Meeting*>(object)->arrived) + " threads have arrived";
}

// After a barrier of all living threads each knows of every other what that one knows of itself. Threads that left are
// known as far as anyone knew them.
void order_block() {
    static std::vector<u32> joined;
    joined.assign(launch.entries, 0);
    if (block_barrier.threads.size() == launch.threads) {
        for (u32 i = 0; i < launch.threads; ++i) joined[i] = threads[i].clock[i];
        for (const u32 id : block_barrier.threads)
            take_later(&joined[launch.threads], threads[id].clock + launch.threads, AGENTS);
    } else {
        for (const u32 id : block_barrier.threads) take_later(joined.data(), threads[id].clock, launch.entries);
    }
    for (const u32 id : block_barrier.threads) {
        memcpy(threads[id].clock, joined.data(), launch.entries * sizeof(u32));
        tick(threads[id]);
    }
}

// Hardware counts those that left as arrived, and tells no two barriers apart; the language allows neither.
void check_convergence() {
    if (const u32 missing = launch.threads - block_barrier.arrived)
        finding("divergent barrier", block_barrier.site,
                "%u of %u threads have left the kernel and never reach this barrier", missing, launch.threads);
    if (block_barrier.other_site)
        finding("divergent barrier", block_barrier.site, "threads meet here that wait at %s and at %s",
                site_text(block_barrier.site).c_str(), site_text(block_barrier.other_site).c_str());
    block_barrier.site = block_barrier.other_site = nullptr;
}

void open_block_barrier_if_complete() {
    if (block_barrier.arrived == 0 || block_barrier.arrived < launch.alive) return;
    check_convergence();
    order_block();
    block_barrier.last_trues = block_barrier.trues;
    block_barrier.arrived = block_barrier.trues = 0;
    block_barrier.threads.clear();
    ++block_barrier.generation;
    notify_all(block_barrier.waiters);
}

u32 sync_block(const char* what, bool predicate, Site site) {
    const u64 generation = block_barrier.generation;
    ++block_barrier.arrived;
    note_change();
    if (!block_barrier.site) block_barrier.site = site;
    if (block_barrier.site != site) block_barrier.other_site = site;
    block_barrier.trues += predicate;
    block_barrier.threads.push_back(current->id);
    open_block_barrier_if_complete();
    wait_until(block_barrier.waiters, {what, site, describe_block_barrier, nullptr},
               [&] { return block_barrier.generation != generation; });
    return block_barrier.last_trues;
}

u64 shuffled(const WarpMeeting& meeting, u32 lane, u32 operation, u32 operand, u32 width) {
    const u32 first = lane & ~(width - 1), last = first + width - 1;
    u32 from = lane;
    if (operation == 0) from = first + (operand & (width - 1));
    if (operation == 1) from = lane - first >= operand ? lane - operand : lane;
    if (operation == 2) from = operand <= last - lane ? lane + operand : lane;
    if (operation == 3) from = (lane ^ operand) <= last ? lane ^ operand : lane;
    return meeting.arrived >> from & 1 ? meeting.values[from] : ~0ull;  // a lane that takes no part: undefined
}

struct Shuffle {
    u32 operation, operand, width;
};

void complete(WarpMeeting& meeting, u32 warp, const Shuffle* shuffles) {
    u64 ballot = 0;
    for (u32 lane = 0; lane < 32; ++lane)
        if ((meeting.arrived >> lane & 1) && meeting.values[lane]) ballot |= 1ull << lane;
    for (u32 lane = 0; lane < 32; ++lane) {
        if (!(meeting.arrived >> lane & 1)) continue;
        Thread& thread = threads[warp * 32 + lane];
        const Shuffle& how = shuffles[lane];
        thread.collective_result =
            meeting.kind == SHUFFLE ? shuffled(meeting, lane, how.operation, how.operand, how.width) : ballot;
        if (meeting.kind == SYNC) take_later(thread.clock, meeting.clock.entries.data(), launch.entries);
    }
    if (current) refresh_fast_path();
}

Shuffle shuffles[MAX_THREADS / 32][32];

u64 meet_in_warp(Kind kind, u32 mask, u64 value, Shuffle how, Site site) {
    Thread& thread = *current;
    const u32 warp = thread.id / 32, lane = thread.id % 32;
    const u32 existing = launch.threads - warp * 32;
    if (existing < 32) mask &= (1u << existing) - 1;
    if (!(mask >> lane & 1))
        fatal("collective", site, "lane %u executes %s whose mask 0x%08x does not name it", lane, NAMES[kind], mask);
    for (u32 other = 0; other < 32; ++other)
        if ((mask >> other & 1) && threads[warp * 32 + other].done)
            fatal("collective", site, "%s names lane %u of warp %u, which has left the kernel", NAMES[kind], other,
                  warp);
    auto& open = warps[warp];
    size_t index = 0;
    while (index < open.size() && (open[index]->kind != kind || open[index]->mask != mask)) ++index;
    if (index == open.size()) {
        open.push_back(std::make_unique<WarpMeeting>());
        open.back()->kind = kind, open.back()->mask = mask;
    }
    WarpMeeting* meeting = open[index].get();
    meeting->values[lane] = value;
    shuffles[warp][lane] = how;
    meeting->arrived |= 1u << lane;
    if (kind == SYNC) release(meeting->clock);
    if (meeting->arrived == mask) {
        const std::unique_ptr<WarpMeeting> full = std::move(open[index]);
        open.erase(open.begin() + (long)index);
        complete(*full, warp, shuffles[warp]);
        notify_all(full->waiters);
        preemption_point();
    } else {
        wait_on(meeting->waiters, {NAMES[kind], site, describe_warp_meeting, meeting});
    }
    return thread.collective_result;
}

}  // namespace

void begin_block_collectives() {
    for (auto& warp : warps) warp.clear();
    for (Meeting& meeting : warpgroups) meeting = Meeting{};
    block_barrier = {};
    atomics = {};
}

void thread_left() {
    open_block_barrier_if_complete();
    thread_left_cluster();
}

}  // namespace core

using namespace core;

void meet(Meeting& meeting, u32 count, bool ordered, const WaitReason& reason, const std::function<void()>& once) {
    if (ordered) release(meeting.gathering);
    if (++meeting.arrived == count) {
        if (once) once();
        meeting.arrived = 0;
        ++meeting.generation;
        meeting.met = meeting.gathering;
        meeting.gathering = {};
        notify_all(meeting.waiters);
        if (ordered) acquire(meeting.met);
        return preemption_point();
    }
    const u64 generation = meeting.generation;
    WaitReason described = reason;
    if (!described.describe) described.describe = describe_meeting, described.object = &meeting;
    wait_until(meeting.waiters, described, [&] { return meeting.generation != generation; });
    if (ordered) acquire(meeting.met);
}

Meeting& warpgroup_meeting() { return warpgroups[current->id / 128]; }

}  // namespace hc::emu

// ---- What kernels call ----

using namespace hc::emu;

extern "C" {

void __syncthreads() { sync_block("__syncthreads", false, HC_EMU_SITE); }
int __syncthreads_count(int predicate) { return (int)sync_block("__syncthreads_count", predicate != 0, HC_EMU_SITE); }
int __syncthreads_or(int predicate) { return sync_block("__syncthreads_or", predicate != 0, HC_EMU_SITE) != 0; }
int __syncthreads_and(int predicate) { return sync_block("__syncthreads_and", predicate == 0, HC_EMU_SITE) == 0; }

void __syncwarp(unsigned mask) { meet_in_warp(SYNC, mask, 0, {}, HC_EMU_SITE); }
unsigned __ballot_sync(unsigned mask, int predicate) {
    return (unsigned)meet_in_warp(BALLOT, mask, predicate != 0, {}, HC_EMU_SITE);
}
int __any_sync(unsigned mask, int predicate) {
    return meet_in_warp(BALLOT, mask, predicate != 0, {}, HC_EMU_SITE) != 0;
}
int __all_sync(unsigned mask, int predicate) {
    return meet_in_warp(BALLOT, mask, predicate == 0, {}, HC_EMU_SITE) == 0;
}
unsigned long long hc_emu_shuffle(unsigned mask, unsigned long long bits, int kind, int operand, int width) {
    const Site site = HC_EMU_SITE;
    if (width < 1 || width > 32 || (width & (width - 1)))
        fatal("collective", site, "a shuffle's width is a power of two up to 32, not %d", width);
    return meet_in_warp(SHUFFLE, mask, bits, {(u32)kind, (u32)operand, (u32)width}, site);
}

// The lanes that have not left: which of them happen to run together is no property of a program.
unsigned __activemask() {
    unsigned mask = 0;
    const u32 first = thread_id() & ~31u;
    for (u32 id = first; id < first + 32 && id < launch.threads; ++id)
        mask |= (unsigned)!threads[id].done << (id - first);
    return mask;
}

void __threadfence_block() {}
void __threadfence() {}
void __nanosleep(unsigned) { yield(); }

unsigned long long __cvta_generic_to_shared(const void* pointer) { return shared_address(pointer, HC_EMU_SITE); }
void* __cvta_shared_to_generic(unsigned long long address) { return shared_pointer((u32)address, 1, HC_EMU_SITE); }
}

void __trap() { fatal("trap", HC_EMU_SITE, "the kernel executed __trap()"); }

// ---- Atomic operations ----

namespace {

// One clock serves all: each atomic operation comes after those before it, on whatever address.
template <class T, class Update>
T atomically(T* at, Site site, Update update) {
    acquire(atomics);
    if (is_shared(at))
        shared_write(at, sizeof(T), sizeof(T), site);
    else
        check_global(at, sizeof(T), true, sizeof(T), "an atomic operation", site);
    if (runs_again() && !is_shared(at))
        fatal("cluster", site, "the emulator takes no atomic operation on global memory before a cluster barrier");
    const T before = *at;
    *at = update(before);
    release(atomics);
    return before;
}

}  // namespace

#define HC_ATOMIC(T)                                                                                \
    T atomicAdd(T* at, T value) {                                                                   \
        return atomically(at, HC_EMU_SITE, [=](T old) { return old + value; });                     \
    }                                                                                               \
    T atomicMax(T* at, T value) {                                                                   \
        return atomically(at, HC_EMU_SITE, [=](T old) { return old < value ? value : old; });       \
    }                                                                                               \
    T atomicMin(T* at, T value) {                                                                   \
        return atomically(at, HC_EMU_SITE, [=](T old) { return value < old ? value : old; });       \
    }                                                                                               \
    T atomicExch(T* at, T value) {                                                                  \
        return atomically(at, HC_EMU_SITE, [=](T) { return value; });                               \
    }                                                                                               \
    T atomicCAS(T* at, T expected, T desired) {                                                     \
        return atomically(at, HC_EMU_SITE, [=](T old) { return old == expected ? desired : old; }); \
    }
HC_ATOMIC(int)
HC_ATOMIC(unsigned)
HC_ATOMIC(unsigned long long)
float atomicAdd(float* at, float value) {
    return atomically(at, HC_EMU_SITE, [=](float old) { return old + value; });
}
