// Named barriers (bar.sync, bar.arrive) and setmaxnreg; the meetings of warps.

#include <cstdio>

#include "engines.h"
#include "polls.h"

namespace hc::emu {

namespace {

constexpr u32 NAMED_BARRIERS = 16, WARPGROUP = 128, MAX_WARPS = 32;

// Registers of a launch: threads own equal parts of the file, in units of 8 and at most what an instruction can name,
// as with __launch_bounds__(threads, 1) and a kernel that uses them all. One with a larger bound, or whose code needs
// fewer, owns less on a GPU. A launch gets no others: the rest of the file stays out of reach.
constexpr u32 REGISTER_FILE = 65536, REGISTER_UNIT = 8, MAX_REGISTERS = 255;

struct NamedBarrier {
    u32 threads = 0;  // of the round under way, 0 if none
    u32 arrived = 0;
    u64 round = 0;
    Clock gathering, met;
    WaitList waiters;
};

NamedBarrier barriers[NAMED_BARRIERS];
Meeting warp_meetings[MAX_WARPS];
const char* warp_purposes[MAX_WARPS];  // what the lanes meet for, while some wait

// setmaxnreg: registers per thread of each warp. What `dec` gives back lies in the block's pool until `inc` takes it.
struct WarpRegisters {
    u32 owned;
    u32 asked;   // by the last setmaxnreg, 0 for never
    u32 wanted;  // by an `inc` that waits, else 0
};
WarpRegisters registers[MAX_WARPS];
u32 pool;  // registers that no warp owns
WaitList pool_waiters;

std::string describe(const void* object) {
    const NamedBarrier& bar = *static_cast<const NamedBarrier*>(object);
    char text[120];
    std::snprintf(text, sizeof text, "barrier %d: %u of %u threads arrived", int(&bar - barriers), bar.arrived,
                  bar.threads);
    return text;
}

void begin_block() {
    for (NamedBarrier& bar : barriers) bar = {};
    for (Meeting& meeting : warp_meetings) meeting = {};
    for (const char*& purpose : warp_purposes) purpose = nullptr;
    const u32 owned = REGISTER_FILE / block_threads() / REGISTER_UNIT * REGISTER_UNIT;
    for (WarpRegisters& warp : registers) warp = {owned < MAX_REGISTERS ? owned : MAX_REGISTERS, 0, 0};
    pool = 0;
    pool_waiters = {};
}

void check_registers() {
    for (u32 warp = 0; warp < MAX_WARPS; ++warp) {
        const u32 asked = registers[warp].asked, first = registers[warp / 4 * 4].asked;
        if (asked != first)
            finding("setmaxnreg", nullptr, "warp %u asked for %u registers, its warpgroup's first warp for %u", warp,
                    asked, first);
    }
}

// Gives the pool's registers to the warps that wait for them, as far as they reach.
void serve_pool() {
    for (WarpRegisters& warp : registers) {
        if (!warp.wanted || (warp.wanted - warp.owned) * 32 > pool) continue;
        pool -= (warp.wanted - warp.owned) * 32;
        warp.owned = warp.wanted;
        warp.wanted = 0;
    }
    notify_all(pool_waiters);
}

// A warp's own change. Registers that it has already, it does not ask for, and those that it lacks, it does not give.
void change_registers(WarpRegisters& warp, u32 count, bool increase) {
    warp.asked = count;
    core::note_change();
    if (increase && count > warp.owned) warp.wanted = count;
    if (!increase && count < warp.owned) {
        pool += (warp.owned - count) * 32;
        warp.owned = count;
    }
    serve_pool();
}

std::string describe_registers(const void* object) {
    const WarpRegisters& warp = *static_cast<const WarpRegisters*>(object);
    char text[120];
    std::snprintf(text, sizeof text, "warp %d owns %u registers per thread and wants %u: %u more; the pool has %u",
                  int(&warp - registers), warp.owned, warp.wanted, (warp.wanted - warp.owned) * 32, pool);
    return text;
}

void end_block() {
    for (const NamedBarrier& bar : barriers)
        if (bar.arrived) finding("barrier", nullptr, "%s when the block ended", describe(&bar).c_str());
    check_registers();
}

std::string report() {
    std::string text;
    for (const NamedBarrier& bar : barriers)
        if (bar.arrived) text += describe(&bar) + "\n";
    return text;
}

BlockHook hook{begin_block, end_block, report};

void check_arguments(u32 id, u32 threads, Site site) {
    if (id == 0 || id >= NAMED_BARRIERS)
        fatal("barrier", site, "barrier %u: named barriers are 1 to %u (0 is __syncthreads)", id, NAMED_BARRIERS - 1);
    if (threads == 0 || threads % 32 || threads > (block_threads() + 31) / 32 * 32)
        fatal("barrier", site, "barrier %u for %u threads: a multiple of 32 up to the block's %u", id, threads,
              block_threads());
}

}  // namespace

u32 warp_threads() {
    const u32 left = block_threads() - warp_id() * 32;
    return left < 32 ? left : 32;
}

void meet_warp(const char* what, Site site, const std::function<void()>& once) {
    const char*& purpose = warp_purposes[warp_id()];
    if (purpose && std::strcmp(purpose, what))
        fatal("divergence", site, "lane %u meets its warp at %s while other lanes are at %s", lane_id(), what, purpose);
    purpose = what;
    meet(warp_meetings[warp_id()], warp_threads(), false, {what, site}, [&] {
        purpose = nullptr;
        once();
    });
}

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

void hc_emu_bar(unsigned id, unsigned threads, bool waits) {
    const Site site = HC_EMU_SITE;
    check_arguments(id, threads, site);
    NamedBarrier& bar = barriers[id];
    if (bar.arrived && bar.threads != threads)
        fatal("barrier", site, "barrier %u for %u threads, while others meet at it for %u", id, threads, bar.threads);
    bar.threads = threads;
    ++bar.arrived;
    core::note_change();
    release(bar.gathering);
    const u64 round = bar.round;
    if (bar.arrived == threads) {
        ++bar.round;
        bar.arrived = 0;
        bar.met = bar.gathering;
        bar.gathering.entries.clear();
        notify_all(bar.waiters);
    }
    if (!waits) return preemption_point();
    const WaitReason reason{"bar.sync", site, describe, &bar};
    wait_until(bar.waiters, reason, [&] { return bar.round != round; });
    acquire(bar.met);
    preemption_point();
}

void hc_emu_setmaxnreg(int count, bool increase) {
    const Site site = HC_EMU_SITE;
    const char* name = increase ? "setmaxnreg.inc" : "setmaxnreg.dec";
    if (count < 24 || count > 256 || count % 8)
        fatal("setmaxnreg", site, "%s of %d: a multiple of 8 from 24 to 256", name, count);
    if (block_threads() % WARPGROUP)
        fatal("setmaxnreg", site, "%s in a block of %u threads: whole warpgroups only", name, block_threads());
    WarpRegisters& warp = registers[warp_id()];
    meet_warp(name, site, [&] { change_registers(warp, u32(count), increase); });
    wait_until(pool_waiters, {name, site, describe_registers, &warp}, [&] { return !warp.wanted; });
}

}  // extern "C"
