// Statistics on request: bytes by class, and the bank conflicts of each shared access site.
//
// The n-th execution of a site by the lanes of a warp is taken as one instruction. Its accesses need as many passes as
// the fullest of the 32 banks of 4 bytes has different words, per group of lanes that one pass can serve at best:
// 32 lanes of up to 4 bytes, 16 of 8, 8 of 16. The degree is passes taken over passes at best.
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>

#include "core.h"

namespace hc::emu {

namespace core {

namespace {

struct SiteStatistics {
    u64 accesses, bytes, instructions, passes, best_passes, worst_degree_milli;
};

struct Execution {
    u32 lanes = 0;
    u32 bytes = 0;
    u64 address[32];
};

struct WarpSite {
    u64 first = 0;  // number of executions.front()
    u64 done[32] = {};
    std::deque<Execution> executions;
};

using SiteKey = std::pair<u64, bool>;  // offset in the module, write
std::map<SiteKey, SiteStatistics> sites;
std::map<std::pair<SiteKey, u32>, WarpSite> warp_sites;
u64 counters[COUNTERS];
bool held;

void finish(SiteStatistics& site, const Execution& execution) {
    const u32 group = execution.bytes <= 4 ? 32 : execution.bytes == 8 ? 16 : 8;
    u64 passes = 0, best = 0;
    for (u32 first = 0; first < 32; first += group) {
        u64 words[32][32];
        u32 filled[32] = {}, fullest = 0;
        for (u32 lane = first; lane < first + group; ++lane) {
            if (!(execution.lanes >> lane & 1)) continue;
            const u64 begin = execution.address[lane] / 4, end = (execution.address[lane] + execution.bytes + 3) / 4;
            for (u64 word = begin; word < end && word < begin + 4; ++word) {
                const u32 bank = word % 32;
                u32 i = 0;
                while (i < filled[bank] && words[bank][i] != word) ++i;
                if (i < filled[bank]) continue;
                words[bank][filled[bank]++] = word;
                if (filled[bank] > fullest) fullest = filled[bank];
            }
        }
        passes += fullest;
        best += fullest > 0;
    }
    if (!best) return;
    ++site.instructions;
    site.passes += passes;
    site.best_passes += best;
    const u64 degree = passes * 1000 / best;
    if (degree > site.worst_degree_milli) site.worst_degree_milli = degree;
}

}  // namespace

void begin_statistics() {
    sites.clear();
    warp_sites.clear();
    memset(counters, 0, sizeof counters);
    held = false;
}

void hold_statistics(bool hold) { held = hold; }

void count_access(u64 address, u32 bytes, bool write, bool shared, Site site) {
    if (held) return;
    counters[shared ? (write ? SHARED_WRITE_BYTES : SHARED_READ_BYTES)
                    : (write ? GLOBAL_WRITE_BYTES : GLOBAL_READ_BYTES)] += bytes;
    if (!shared) return;
    const SiteKey key{(u64)site - launch.module.begin - 1, write};
    SiteStatistics& total = sites[key];
    ++total.accesses;
    total.bytes += bytes;
    WarpSite& warp_site = warp_sites[{key, current->id / 32}];
    const u32 lane = current->id % 32;
    const u64 number = warp_site.done[lane]++ - warp_site.first;
    while (warp_site.executions.size() <= number) warp_site.executions.emplace_back();
    Execution& execution = warp_site.executions[number];
    execution.lanes |= 1u << lane;
    execution.bytes = bytes;
    execution.address[lane] = address;
    while (!warp_site.executions.empty() && warp_site.executions.front().lanes == 0xffffffffu) {
        finish(total, warp_site.executions.front());
        warp_site.executions.pop_front();
        ++warp_site.first;
    }
}

void end_block_statistics() {
    for (auto& [key, warp_site] : warp_sites)
        for (const Execution& execution : warp_site.executions) finish(sites[key.first], execution);
    warp_sites.clear();
}

}  // namespace core

void count(Counter counter, u64 amount) {
    if (!core::held) core::counters[counter] += amount;
}

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

struct SiteView {
    u64 offset, write;
    core::SiteStatistics statistics;
};

u64 hc_emu_counter(u64 counter) { return core::counters[counter]; }
u64 hc_emu_site_count() { return core::sites.size(); }
void hc_emu_sites(SiteView* views) {
    for (const auto& [key, statistics] : core::sites) *views++ = {key.first, key.second, statistics};
}
}
