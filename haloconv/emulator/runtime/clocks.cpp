// Happens-before: the vector clocks of threads and of asynchronous writers.
#include <cstring>

#include "core.h"

namespace hc::emu {

namespace core {

namespace {

u32 agent_clocks[AGENTS];
u32 agents;

}  // namespace

void begin_block_agents() {
    memset(agent_clocks, 0, sizeof agent_clocks);
    agents = 0;
}

// At the end of its range a clock stands still: from then on less is found, nothing is found wrongly.
u32 agent_tick(u32 agent) {
    if (agent_clocks[agent] < CLOCK_MASK) ++agent_clocks[agent];
    return agent_clocks[agent];
}

void tick(Thread& thread) {
    u32& now = thread.clock[thread.id];
    if (now < CLOCK_MASK) ++now;
    if (&thread == current) refresh_fast_path();
}

}  // namespace core

using namespace core;

void release(Clock& clock) {
    Thread& thread = *current;
    merge(clock, {});
    take_later(clock.entries.data(), thread.clock, launch.entries);
    tick(thread);
}

void acquire(const Clock& clock) {
    if (!clock.entries.empty()) take_later(current->clock, clock.entries.data(), launch.entries);
}

void merge(Clock& into, const Clock& from) {
    if (into.entries.size() != launch.entries) into.entries.assign(launch.entries, 0);
    take_later(into.entries.data(), from.entries.data(), (u32)from.entries.size());
}

void release_agent(Clock& clock, u32 agent) {
    merge(clock, {});
    u32& entry = clock.entries[launch.threads + agent];
    if (agent_clocks[agent] > entry) entry = agent_clocks[agent];
}

u32 new_agent() { return agents++ % AGENTS; }

void clock_of(const Thread& thread, Clock& clock) { clock.entries.assign(thread.clock, thread.clock + launch.entries); }

void fence_proxy_async() {
    Thread& thread = *current;
    thread.fence_clock = thread.clock[thread.id];
    tick(thread);
}

}  // namespace hc::emu
