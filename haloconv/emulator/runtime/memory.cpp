// Shared and global memory: what may be accessed, and the shadow that finds races, unwritten reads and proxy errors.
#include <dlfcn.h>
#include <link.h>

#include <cstring>

#include "shadow.h"

extern "C" {
// Dynamic shared memory. Kernels declare it as `extern __shared__ char dynamic_smem[];`.
extern void* __tls_get_addr(void*);
alignas(1024) thread_local char dynamic_smem[hc::emu::core::MAX_DYNAMIC_BYTES];
}

namespace hc::emu {

namespace core {

namespace {

u64 dynamic_window;  // shared address of dynamic_smem

u64 window_of(u64 address) {
    if (launch.dynamic_smem.holds(address)) return dynamic_window + (address - launch.dynamic_smem.begin);
    if (launch.static_smem.holds(address)) return WINDOW_BASE + (address - launch.static_smem.begin);
    return 0;
}

bool holds_all(const Range& range, u64 address, u64 bytes) {
    return range.holds(address) && range.begin + range.bytes - address >= bytes;
}

// ---- Accesses that the fast path does not take ----

const Region* region_with(u64 address) {
    for (u64 i = 0; i < launch.request.region_count; ++i) {
        const Region& region = launch.request.regions[i];
        if (address - region.begin < region.end - region.begin) return &region;
    }
    return nullptr;
}

// Several regions may hold an address (views of one tensor): one that holds all of the access decides.
const Region* region_for(u64 address, u64 bytes, bool write) {
    const Region* best = nullptr;
    for (u64 i = 0; i < launch.request.region_count; ++i) {
        const Region& region = launch.request.regions[i];
        if (address < region.begin || bytes > region.end - region.begin || address > region.end - bytes) continue;
        if (!best || region.writable) best = &region;
        if (!write || region.writable) return &region;
    }
    return best;
}

}  // namespace

std::string whereabouts(u64 address) {
    for (u32 id = 0; id < launch.threads; ++id)
        if (address - threads[id].stack_low < STACK_BYTES) return "local memory of thread " + std::to_string(id);
    const char* nearest_side = nullptr;
    u64 nearest = 4096, index = 0;
    for (u64 i = 0; i < launch.request.region_count; ++i) {
        const Region& region = launch.request.regions[i];
        const u64 before = region.begin - address, after = address - region.end;
        if (address < region.begin && before < nearest) nearest = before, index = i, nearest_side = "before the start";
        if (address >= region.end && after < nearest) nearest = after, index = i, nearest_side = "behind the end";
    }
    const Range& dynamic = launch.dynamic_smem;
    if (address >= dynamic.begin && address < dynamic.begin + MAX_DYNAMIC_BYTES)
        return std::to_string(address - dynamic.begin - dynamic.bytes) + " bytes behind the end of the block's " +
               std::to_string(dynamic.bytes) + " bytes of dynamic shared memory";
    if (launch.static_smem.bytes && address - (launch.static_smem.begin - 256) < launch.static_smem.bytes + 512)
        return "next to the block's static shared memory";
    if (!nearest_side) return "nothing known is near";
    return std::to_string(nearest) + " bytes " + nearest_side + " of tensor " + std::to_string(index) +
           " of the launch";
}

void check_alignment(u64 address, u64 bytes, u64 align, bool write, Site site) {
    if (HC_LIKELY((address & (align - 1)) == 0)) return;
    fatal("misaligned", site, "this %s of %llu bytes needs an address that is a multiple of %llu; %s is not",
          write ? "write" : "read", (unsigned long long)bytes, (unsigned long long)align, place_of(address).c_str());
}

void check_time() {
    if (HC_UNLIKELY(launch.expired)) time_is_up();
}

bool in_block_memory(u64 address, u64 bytes) {
    return holds_all(launch.dynamic_smem, address, bytes) || holds_all(launch.static_smem, address, bytes);
}

namespace {

template <bool WRITE>
__attribute__((noinline)) void access_slowly(u64 address, u64 bytes, u64 align, Site site) {
    check_time();
    check_alignment(address, bytes, align, WRITE, site);
    const Range stack{current->stack_low, STACK_BYTES};
    if (stack.holds(address)) return;
    if (in_block_memory(address, bytes)) {
        if (launch.statistics) count_access(address, (u32)bytes, WRITE, true, site);
        return access_words<WRITE>(shadow_of(address), address, bytes, site);
    }
    if (in_peer_memory(address)) return peer_access(address, bytes, WRITE, site);
    const Region* region = region_for(address, bytes, WRITE);
    if (region && (!WRITE || region->writable)) {
        if (WRITE) claim(owners_of(address), bytes, address, site);
        if (launch.statistics) return count_access(address, (u32)bytes, WRITE, false, site);
        fast.region_begin = region->begin, fast.region_bytes = region->end - region->begin;
        fast.region_owners = region->writable ? owners_of(region->begin) : nullptr;
        return;
    }
    if (region)
        fatal("read-only", site, "this write of %llu bytes goes to %s, which is an input", (unsigned long long)bytes,
              place_of(address).c_str());
    if (!WRITE && holds_all(launch.module, address, bytes)) return;  // constants of the kernel
    fatal("out of bounds", site, "this %s of %llu bytes is outside every tensor and the block's shared memory: %s",
          WRITE ? "write" : "read", (unsigned long long)bytes, whereabouts(address).c_str());
}

template <bool WRITE, u64 BYTES>
inline __attribute__((always_inline)) void access(const void* pointer, Site site) {
    const u64 address = (u64)pointer;
    if (address - fast.stack_low < fast.stack_bytes) return;
    constexpr u64 ALIGN = BYTES < 8 ? BYTES : 8;  // what the compiler promises; types of 16 are checked apart
    if (HC_UNLIKELY(address & (ALIGN - 1))) return access_slowly<WRITE>(address, BYTES, ALIGN, site);
    const u64 offset = address - fast.dynamic_begin;
    if (HC_LIKELY(offset < fast.dynamic_bytes)) {
        if (HC_UNLIKELY(offset + BYTES > fast.dynamic_bytes)) return access_slowly<WRITE>(address, BYTES, 1, site);
        Word* word = shadow + (dynamic_window - WINDOW_BASE + offset) / 4;
        if constexpr (BYTES % 4 == 0) {
#pragma GCC unroll 4
            for (u64 i = 0; i < BYTES / 4; ++i)
                WRITE ? write_word(word[i], address + 4 * i, site) : read_word(word[i], address + 4 * i, site);
        } else {
            access_words<WRITE>(word, address, BYTES, site);
        }
        return;
    }
    const u64 in_region = address - fast.region_begin;
    if (HC_LIKELY(in_region < fast.region_bytes && in_region + BYTES <= fast.region_bytes &&
                  (!WRITE || fast.region_owners))) {
        if constexpr (WRITE) claim(fast.region_owners + in_region, BYTES, address, site);
        return;
    }
    access_slowly<WRITE>(address, BYTES, ALIGN, site);
}

// The module of an entry: where it is loaded, and its TLS segment, which is its static shared memory.
struct ModuleRanges {
    Range module, static_smem;
};

int find_ranges(dl_phdr_info* info, size_t, void* result) {
    auto& ranges = *static_cast<ModuleRanges*>(result);
    if (info->dlpi_addr != ranges.module.begin) return 0;
    for (u32 i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        const u64 end = header.p_vaddr + header.p_memsz;
        if (header.p_type == PT_LOAD && end > ranges.module.bytes) ranges.module.bytes = end;
        if (header.p_type != PT_TLS) continue;
        struct {
            u64 module, offset;
        } start = {info->dlpi_tls_modid, 0};
        ranges.static_smem = {(u64)__tls_get_addr(&start), header.p_memsz};
    }
    return 1;
}

ModuleRanges ranges_of(const void* entry) {
    ModuleRanges ranges;
    Dl_info info;
    if (dladdr(entry, &info)) ranges.module.begin = (u64)info.dli_fbase;
    dl_iterate_phdr(find_ranges, &ranges);
    return ranges;
}

}  // namespace

Range static_smem_of(const void* entry) { return ranges_of(entry).static_smem; }

void begin_launch_memory() {
    const ModuleRanges ranges = ranges_of((const void*)launch.request.entry);
    launch.module = ranges.module, launch.static_smem = ranges.static_smem;
    begin_launch_owners();
    launch.dynamic_smem = {(u64)dynamic_smem, launch.request.dynamic_bytes};
    dynamic_window = (WINDOW_BASE + launch.static_smem.bytes + 1023) / 1024 * 1024;
    fast = {};
    fast.stack_bytes = STACK_BYTES;
    fast.dynamic_begin = launch.dynamic_smem.begin;
    fast.dynamic_bytes = launch.statistics ? 0 : launch.dynamic_smem.bytes;
}

void begin_block_memory() {
    memset((void*)launch.dynamic_smem.begin, 0xff, launch.dynamic_smem.bytes);  // NaN in every format
    if (launch.static_smem.bytes) memset((void*)launch.static_smem.begin, 0xff, launch.static_smem.bytes);
    begin_block_shadow((shared_window_bytes() + 3) / 4);
    begin_block_agents();
}

u64 shared_window_bytes() { return dynamic_window - WINDOW_BASE + launch.dynamic_smem.bytes; }

void copy_window(char* to) {
    memcpy(to, (const void*)launch.static_smem.begin, launch.static_smem.bytes);
    memcpy(to + (dynamic_window - WINDOW_BASE), (const void*)launch.dynamic_smem.begin, launch.dynamic_smem.bytes);
}

void refresh_fast_path() {
    const Thread& thread = *current;
    fast.stack_low = thread.stack_low;
    fast.clock = thread.clock;
    fast.epoch = epoch(thread.id, thread.clock[thread.id], 3);
    fast.slot = thread.id / 32 % READ_SLOTS;
}

void slow_accesses() {
    fast.dynamic_bytes = 0;
    fast.region_bytes = 0;
}

Word* shadow_of(u64 address) {
    const u64 window = window_of(address);
    return window ? shadow + (window - WINDOW_BASE) / 4 : nullptr;
}

std::string place_of(u64 address) {
    char text[96];
    if (const u64 window = window_of(address)) {
        const bool dynamic = launch.dynamic_smem.holds(address);
        const u64 offset = address - (dynamic ? launch.dynamic_smem.begin : launch.static_smem.begin);
        snprintf(text, sizeof text, "%s shared memory + %llu (shared address 0x%llx)", dynamic ? "dynamic" : "static",
                 (unsigned long long)offset, (unsigned long long)window);
        return text;
    }
    if (const Region* region = region_with(address)) {
        snprintf(text, sizeof text, "tensor %d of the launch + %llu bytes", (int)(region - launch.request.regions),
                 (unsigned long long)(address - region->begin));
        return text;
    }
    snprintf(text, sizeof text, "address 0x%llx", (unsigned long long)address);
    return text;
}

}  // namespace core

using namespace core;

// ---- The interface of the primitives ----

bool is_shared(const void* pointer) { return window_of((u64)pointer) != 0; }

u32 shared_address(const void* pointer, Site site) {
    const u64 window = window_of((u64)pointer);
    if (!window) fatal("out of bounds", site, "%s is no shared memory", place_of((u64)pointer).c_str());
    return (u32)window;
}

void* shared_pointer(u32 address, u32 bytes, Site site) {
    const u64 offset = address - dynamic_window;
    if (address >= dynamic_window && offset + bytes <= launch.dynamic_smem.bytes)
        return (void*)(launch.dynamic_smem.begin + offset);
    const u64 static_offset = address - WINDOW_BASE;
    if (address >= WINDOW_BASE && static_offset + bytes <= launch.static_smem.bytes)
        return (void*)(launch.static_smem.begin + static_offset);
    fatal("out of bounds", site, "shared addresses 0x%x to 0x%x are not inside the block's shared memory", address,
          address + bytes);
}

void check_global(const void* pointer, u64 bytes, bool write, u32 align, const char* what, Site site) {
    const u64 address = (u64)pointer;
    check_alignment(address, bytes, align, write, site);
    const Region* region = region_for(address, bytes, write);
    if (!region)
        fatal("out of bounds", site, "%s of %llu bytes is not inside one tensor: %s", what, (unsigned long long)bytes,
              region_with(address) ? place_of(address).c_str() : whereabouts(address).c_str());
    if (write && !region->writable)
        fatal("read-only", site, "%s writes to %s, which is an input", what, place_of(address).c_str());
}

}  // namespace hc::emu

// ---- What instrumented code calls at each access (g++ -fsanitize=thread) ----

using hc::emu::u64;
using namespace hc::emu::core;

namespace {

template <bool WRITE>
void access_range(const void* at, u64 bytes, hc::emu::Site site) {
    if ((u64)at - fast.stack_low < fast.stack_bytes || bytes == 0) return;
    access_slowly<WRITE>((u64)at, bytes, 1, site);
}

}  // namespace

#define HC_SIZED_ACCESS(BYTES)                                                                   \
    void __tsan_read##BYTES(void* at) { access<false, BYTES>(at, HC_EMU_SITE); }                 \
    void __tsan_write##BYTES(void* at) { access<true, BYTES>(at, HC_EMU_SITE); }                 \
    void __tsan_unaligned_read##BYTES(void* at) { access_range<false>(at, BYTES, HC_EMU_SITE); } \
    void __tsan_unaligned_write##BYTES(void* at) { access_range<true>(at, BYTES, HC_EMU_SITE); }

extern "C" {
HC_SIZED_ACCESS(1)
HC_SIZED_ACCESS(2)
HC_SIZED_ACCESS(4)
HC_SIZED_ACCESS(8)
HC_SIZED_ACCESS(16)
void __tsan_read_range(void* at, u64 bytes) { access_range<false>(at, bytes, HC_EMU_SITE); }
void __tsan_write_range(void* at, u64 bytes) { access_range<true>(at, bytes, HC_EMU_SITE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
