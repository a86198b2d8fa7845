// Findings, and the C interface that Python drives (haloconv/emulator/runtime.py).
#include <cstdarg>
#include <cstring>
#include <deque>

#include "core.h"

namespace hc::emu {

namespace core {

namespace {

struct Finding {
    std::string kind, text;
    u64 offset;  // of the site in the kernel's module; 0 if there is none
    u64 thread, block, count;
};
std::deque<Finding> findings;
constexpr size_t FINDING_LIMIT = 64;
constexpr const char* DIVERGENT = "divergent barrier";  // Python drops it where both places are one line

u64 offset_of(Site site) { return launch.module.holds((u64)site) ? (u64)site - launch.module.begin - 1 : 0; }

void add(const char* kind, Site site, const std::string& text) {
    const u64 offset = offset_of(site);
    for (Finding& known : findings)
        if (known.kind == kind && known.offset == offset) return void(++known.count);
    if (findings.size() == FINDING_LIMIT) return;
    findings.push_back({kind, text, offset, current ? current->id : 0, launch.block, 1});
    if (launch.request.one_finding && findings.back().kind != DIVERGENT) leave_launch();
}

std::string formatted(const char* format, va_list arguments) {
    va_list copy;
    va_copy(copy, arguments);
    std::string text((size_t)vsnprintf(nullptr, 0, format, copy) + 1, '\0');
    va_end(copy);
    vsnprintf(text.data(), text.size(), format, arguments);
    text.pop_back();
    return text;
}

}  // namespace

// Python replaces the marker by file and line.
std::string site_text(Site site) {
    char text[40];
    snprintf(text, sizeof text, "<<%llx>>", (unsigned long long)offset_of(site));
    return text;
}

void begin_findings() { findings.clear(); }

void add_deadlock(const std::string& report) {
    add("deadlock", nullptr,
        "every thread waits and no copy is under way; block " + std::to_string(launch.block) + ":" + report);
    leave_launch();
}

}  // namespace core

using namespace core;

void finding(const char* kind, Site site, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    add(kind, site, formatted(format, arguments));
    va_end(arguments);
}

void fatal(const char* kind, Site site, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    add(kind, site, formatted(format, arguments));
    va_end(arguments);
    leave_launch();
}

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

struct FindingView {
    const char *kind, *text;
    u64 offset, thread, block, count;
};

// Runs the launch; the number of findings.
u64 hc_emu_run(const void* request) {
    begin_findings();
    run_launch(*static_cast<const Request*>(request));
    return findings.size();
}

// Bytes of static shared memory of the module that holds `entry`.
u64 hc_emu_static_smem_bytes(const void* entry) { return static_smem_of(entry).bytes; }

void hc_emu_finding(u64 index, FindingView* view) {
    const Finding& found = findings[index];
    *view = {found.kind.c_str(), found.text.c_str(), found.offset, found.thread, found.block, found.count};
}

// ---- g++ -fsanitize=alignment,bounds: what types promise, beyond what addresses show ----

struct UbsanPlace {
    const char* file;
    u32 line, column;
};
struct UbsanType {
    u16 kind, info;
    char name[1];
};
struct UbsanMismatch {
    UbsanPlace place;
    const UbsanType* type;
    unsigned char log_align, check;
};
struct UbsanBounds {
    UbsanPlace place;
    const UbsanType *array, *index;
};

void __ubsan_handle_type_mismatch_v1(UbsanMismatch* what, u64 address) {
    fatal("misaligned", HC_EMU_SITE, "%s needs an address that is a multiple of %llu; %s is not", what->type->name,
          1ull << what->log_align, place_of(address).c_str());
}

void __ubsan_handle_out_of_bounds(UbsanBounds* what, u64 index) {
    fatal("out of bounds", HC_EMU_SITE, "index %lld is outside the array %s", (long long)index, what->array->name);
}
}
