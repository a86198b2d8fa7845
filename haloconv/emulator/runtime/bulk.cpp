// Bulk copies by TMA, both ways, and the bulk groups of each thread (tensor stores belong to them too).

#include <algorithm>
#include <memory>

#include "bulk.h"

namespace hc::emu {

namespace {

// A store in two steps: its source is read, and later its destination written. The thread that waits for it may let
// others overwrite the source from then on, not before, however early the engine has read it.
struct Store {
    Operation read, write;
    const void* source;
    u32 bytes;
    Site site;
    bool released = false;
};
using Group = std::vector<Store>;

struct ThreadGroups {
    Group open;
    std::vector<Group> closed;  // oldest first
};

std::vector<ThreadGroups> groups;

ThreadGroups& own_groups() {
    if (groups.size() <= thread_id()) groups.resize(block_threads());
    return groups[thread_id()];
}

void begin_block() { groups.clear(); }

void end_block() {
    u64 unread = 0;
    for (const ThreadGroups& thread : groups) {
        unread += thread.open.size();
        for (const Group& group : thread.closed)
            for (const Store& store : group) unread += !store.released;
    }
    if (unread)
        finding("unfinished copy", nullptr,
                "%llu bulk stores may still read shared memory when the block ends: wait_group.read is missing",
                (unsigned long long)unread);
}

BlockHook hook{begin_block, end_block, nullptr};

void check_transfer(const void* smem, const void* global, u32 bytes, Site site) {
    if (bytes == 0 || bytes % 16) fatal("bulk copy", site, "%u bytes: a bulk copy moves a multiple of 16", bytes);
    if (!is_shared(smem)) fatal("bulk copy", site, "%p is not in shared memory", smem);
    if (is_shared(global)) fatal("bulk copy", site, "%p is in shared memory where global memory is meant", global);
}

}  // namespace

void submit_store(const char* what, const void* source, u32 bytes, Site site, std::function<void()> read,
                  std::function<void()> write) {
    async_read_begin(source, bytes, 16, true, site);
    count(ASYNC_WRITE_BYTES, bytes);
    const Operation first = submit(what, true, std::move(read));
    const Operation second = submit(what, true, [first, write = std::move(write)] {
        land_now(first);
        write();
    });
    own_groups().open.push_back({first, second, source, bytes, site});
    preemption_point();
}

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

void hc_emu_bulk_load(void* dst, const void* src, unsigned bytes, void* word) {
    const Site site = HC_EMU_SITE;
    check_transfer(dst, src, bytes, site);
    Mbarrier& bar = mbarrier_of_engine(word, site);
    check_global(src, bytes, false, 16, "bulk copy", site);
    async_write_begin(dst, bytes, 16, site);
    count(ASYNC_READ_BYTES, bytes);
    copy_begins();
    submit("bulk copy to shared memory", true, [=, &bar] {
        std::memcpy(dst, src, bytes);
        engine_wrote(bar, dst, bytes, site);
        copy_ends();
        complete_bytes(bar, bytes, site);
    });
    preemption_point();
}

void hc_emu_bulk_store(void* dst, const void* src, unsigned bytes) {
    const Site site = HC_EMU_SITE;
    check_transfer(src, dst, bytes, site);
    check_global(dst, bytes, true, 16, "bulk copy", site);
    written_by_block(dst, bytes, site);
    const auto data = std::make_shared<std::vector<u8>>(bytes);
    submit_store(
        "bulk copy to global memory", src, bytes, site, [=] { std::memcpy(data->data(), src, bytes); },
        [=] { std::memcpy(dst, data->data(), bytes); });
}

void hc_emu_bulk_commit_group() {
    ThreadGroups& own = own_groups();
    own.closed.push_back(std::move(own.open));
    own.open.clear();
}

void hc_emu_bulk_wait_group(int youngest, bool reads_only) {
    preemption_point();
    std::vector<Group>& closed = own_groups().closed;
    const std::size_t done = closed.size() > std::size_t(youngest) ? closed.size() - youngest : 0;
    for (std::size_t i = 0; i < done; ++i)
        for (Store& store : closed[i]) {
            land_now(reads_only ? store.read : store.write);
            if (!store.released) async_read_end(store.source, store.bytes, thread_id(), store.site);
            store.released = true;
        }
    const auto finished = [](const Store& store) { return store.released && landed(store.write); };
    while (!closed.empty() && std::all_of(closed.front().begin(), closed.front().end(), finished))
        closed.erase(closed.begin());
}

}  // extern "C"
