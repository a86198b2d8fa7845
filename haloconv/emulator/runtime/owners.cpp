// Which block wrote each byte of global memory: two blocks of a launch that write the same one are in no order.
#include <sys/mman.h>

#include <algorithm>

#include "core.h"

namespace hc::emu {

namespace core {

namespace {

// Writable memory without gaps: regions may share bytes (views of one tensor). `owners` has for each byte 1 + the last
// block that wrote it, 0 for none; made when it is first needed.
struct Span {
    u64 begin, end;
    u32* owners;
};
std::vector<Span> spans;

}  // namespace

void begin_launch_owners() {
    spans.clear();
    for (u64 i = 0; i < launch.request.region_count; ++i) {
        const Region& region = launch.request.regions[i];
        if (region.writable && region.begin < region.end) spans.push_back({region.begin, region.end, nullptr});
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    size_t last = 0;
    for (size_t i = 1; i < spans.size(); ++i) {
        if (spans[i].begin < spans[last].end)
            spans[last].end = std::max(spans[last].end, spans[i].end);
        else
            spans[++last] = spans[i];
    }
    if (!spans.empty()) spans.resize(last + 1);
}

void end_launch_owners() {
    for (const Span& span : spans)
        if (span.owners) munmap(span.owners, (span.end - span.begin) * sizeof(u32));
    spans.clear();
}

u32* owners_of(u64 address) {
    auto span =
        std::upper_bound(spans.begin(), spans.end(), address, [](u64 at, const Span& each) { return at < each.end; });
    if (span == spans.end() || address < span->begin) return nullptr;
    if (!span->owners) {  // pages that nobody writes take no memory
        void* memory = mmap(nullptr, (span->end - span->begin) * sizeof(u32), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        span->owners = static_cast<u32*>(memory);
    }
    return span->owners + (address - span->begin);
}

void report_overlap(u32 before, u64 bytes, u64 address, Site site) {
    finding("overlapping writes", site,
            "this write of %llu bytes goes to %s, which block %u has written too: which comes last is open",
            (unsigned long long)bytes, place_of(address).c_str(), before - 1);
}

}  // namespace core

using namespace core;

void written_by_block(const void* pointer, u64 bytes, Site site) {
    if (bytes) claim(owners_of((u64)pointer), bytes, (u64)pointer, site);
}

}  // namespace hc::emu
