// Fibers, the scheduler and the launch of a kernel: blocks one after another, each CUDA thread as a fiber.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <numeric>
#include <unordered_map>

#include "core.h"
#include "polls.h"
#include "watchdog.h"

// Define HC_EMU_UCONTEXT to switch fibers by the C library on x86-64 too.
#if !defined(__x86_64__)
#define HC_EMU_UCONTEXT
#endif
#if defined(HC_EMU_UCONTEXT)
#include <ucontext.h>
#endif

extern "C" {
hc::emu::u32 threadIdx[3], blockIdx[3], blockDim[3], gridDim[3];
}

namespace hc::emu {

namespace core {

Launch launch;
Thread threads[MAX_THREADS];
Thread* current;
FastPath fast;
BlockHook* hooks;

namespace {

struct PendingOperation {
    Operation number;
    const char* what;
    bool early;
    std::function<void()> land;
};

std::vector<u32> ready;
std::vector<PendingOperation> pending;
std::unordered_map<Operation, size_t> place_of_pending;  // index into `pending`
Operation last_operation;
u64 random_state;
constexpr u32 POLLS_FIRST = 4;  // where all wait: one in so many times polls give up before an operation lands
u32 early_odds;                 // one in so many preemption points lands an operation; 0 for never
char* stacks;
std::vector<u32> clocks;  // of all threads
Thread outside;           // the launching thread, between blocks
bool left;                // a fiber has ended the launch

struct LeftLaunch {};

// ---- Switching ----

#if !defined(HC_EMU_UCONTEXT)
extern "C" void hc_emu_switch(void** from, void* to);
asm(R"(
    .text
    .hidden hc_emu_switch
    .globl hc_emu_switch
    .type hc_emu_switch, @function
hc_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size hc_emu_switch, . - hc_emu_switch
)");

void prepare_stack(Thread& thread, void (*body)()) {
    void** top = reinterpret_cast<void**>(thread.stack_low + STACK_BYTES);
    *--top = nullptr;  // a return address for body, which never returns; keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(body);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    thread.stack_pointer = top;
}

void switch_between(Thread& from, Thread& to) { hc_emu_switch(&from.stack_pointer, to.stack_pointer); }
#else
ucontext_t contexts[MAX_THREADS + 1];
u32 context_number(const Thread& thread) { return &thread == &outside ? MAX_THREADS : thread.id; }

void prepare_stack(Thread& thread, void (*body)()) {
    ucontext_t& context = contexts[thread.id];
    getcontext(&context);
    context.uc_stack.ss_sp = reinterpret_cast<void*>(thread.stack_low);
    context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context, body, 0);
}

void switch_between(Thread& from, Thread& to) {
    swapcontext(&contexts[context_number(from)], &contexts[context_number(to)]);
}
#endif

void switch_to(Thread& next) {
    Thread& before = *current;
    if (&next == &before) return;
    current = &next;
    if (&next != &outside) {
        threadIdx[0] = next.id;
        refresh_fast_path();
    }
    switch_between(before, next);
}

void thread_body() {
    launch.request.entry(launch.request.arguments);
    Thread& thread = *current;
    thread.done = true;
    --launch.alive;
    note_change();
    thread_left();
    if (launch.alive == 0) switch_to(outside);
    yield();
    __builtin_unreachable();
}

// ---- Choosing who runs ----

void land(size_t index) {
    const auto land = std::move(pending[index].land);
    place_of_pending.erase(pending[index].number);
    if (index + 1 < pending.size()) {
        pending[index] = std::move(pending.back());
        place_of_pending[pending[index].number] = index;
    }
    pending.pop_back();
    note_change();
    land();
}

std::string describe_thread(const Thread& thread) {
    if (thread.done) return "has left the kernel";
    if (!thread.waiting) return "can run";
    const WaitReason& reason = thread.reason;
    std::string text = std::string("waits at ") + reason.what + " " + site_text(reason.site);
    if (reason.describe) text += " (" + reason.describe(reason.object) + ")";
    return text;
}

std::string ranges(const std::vector<u32>& lanes) {
    std::string text;
    for (size_t i = 0; i < lanes.size();) {
        size_t last = i;
        while (last + 1 < lanes.size() && lanes[last + 1] == lanes[last] + 1) ++last;
        text += (text.empty() ? "" : ",") + std::to_string(lanes[i]);
        if (last > i) text += "-" + std::to_string(lanes[last]);
        i = last + 1;
    }
    return text;
}

std::string state_of_block() {
    std::string report;
    for (u32 first = 0; first < launch.threads; first += 32) {
        std::vector<std::pair<std::string, std::vector<u32>>> groups;
        for (u32 id = first; id < first + 32 && id < launch.threads; ++id) {
            const std::string text = describe_thread(threads[id]);
            auto group = groups.begin();
            while (group != groups.end() && group->first != text) ++group;
            if (group == groups.end()) group = groups.insert(group, {text, {}});
            group->second.push_back(id - first);
        }
        report += "\n  warp " + std::to_string(first / 32);
        for (const auto& [text, lanes] : groups)
            report += (groups.size() > 1 ? "\n    lanes " : ", lanes ") + ranges(lanes) + ": " + text;
    }
    std::map<std::string, u32> under_way;
    for (const PendingOperation& each : pending) ++under_way[each.what];
    for (const auto& [what, number] : under_way) report += "\n  under way: " + std::to_string(number) + " x " + what;
    for (BlockHook* hook = hooks; hook; hook = hook->next)
        if (hook->report) report += hook->report();
    return report;
}

Thread& next_thread() {
    refuse_polls_that_are_due();
    while (ready.empty()) {
        const bool first_polls = launch.request.seed != 0 && polls_wait() && one_in(POLLS_FIRST);
        if (!pending.empty() && !first_polls)
            land(random_below((u32)pending.size()));
        else if (!refuse_all_polls() && pending.empty())
            add_deadlock(state_of_block());
    }
    const u32 index = launch.request.seed == 0 ? 0 : random_below((u32)ready.size());
    const u32 id = ready[index];
    if (launch.request.seed == 0) {
        ready.erase(ready.begin());
    } else {
        ready[index] = ready.back();
        ready.pop_back();
    }
    return threads[id];
}

void schedule() {
    if (HC_UNLIKELY(launch.expired)) time_is_up();
    switch_to(next_thread());
}

// ---- A launch ----

void make_stacks() {
    if (stacks) return;
    const u64 guard = (u64)sysconf(_SC_PAGESIZE), pitch = STACK_BYTES + guard;
    void* memory =
        mmap(nullptr, MAX_THREADS * pitch, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    stacks = static_cast<char*>(memory);
    for (u32 i = 0; i < MAX_THREADS; ++i) {
        mprotect(stacks + i * pitch, guard, PROT_NONE);
        threads[i].stack_low = (u64)stacks + i * pitch + guard;
    }
}

void begin_threads() {
    ready.clear();
    pending.clear();
    place_of_pending.clear();
    clocks.assign((size_t)launch.threads * launch.entries, 0);
    for (u32 id = 0; id < launch.threads; ++id) {
        Thread& thread = threads[id];
        const u64 stack_low = thread.stack_low;
        thread = Thread{};
        thread.id = id, thread.stack_low = stack_low;
        thread.clock = clocks.data() + (size_t)id * launch.entries;
        thread.clock[id] = 1;
        prepare_stack(thread, thread_body);
        ready.push_back(id);
    }
    launch.alive = launch.threads;
}

// Runs a block to its end, or to its first cluster barrier.
void run_block(u64 block, bool to_cluster_barrier) {
    launch.block = block;
    blockIdx[0] = (u32)block;
    begin_threads();
    begin_block_memory();
    begin_block_collectives();
    begin_block_polls();
    begin_block_cluster(to_cluster_barrier);
    hold_statistics(to_cluster_barrier);
    for (BlockHook* hook = hooks; hook; hook = hook->next)
        if (hook->begin) hook->begin();
    current = &outside;
    left = false;
    schedule();
    if (left) throw LeftLaunch{};
    if (to_cluster_barrier) return;
    while (!pending.empty()) land(random_below((u32)pending.size()));
    for (BlockHook* hook = hooks; hook; hook = hook->next)
        if (hook->end) hook->end();
    end_block_cluster();
    end_block_statistics();
}

void run_cluster(u64 first) {
    const u64 blocks = launch.request.cluster;
    if (blocks < 2) return run_block(first, false);
    begin_cluster();
    for (const bool to_cluster_barrier : {true, false})
        for (u64 i = 0; i < blocks; ++i) run_block(first + i, to_cluster_barrier);
    end_cluster();
}

// On a GPU the order of clusters, of a block each as a rule, is open. Here it is that of the index with seed 0, the
// reverse with seeds 1, 4, 7 and so on, and else it begins with any of them and goes on by any step that reaches all.
void run_blocks() {
    const u64 cluster = launch.request.cluster, grid = launch.request.grid / cluster;
    u64 step = 1, block = 0;
    if (launch.request.seed % 3 == 1) {
        step = block = grid - 1;
    } else if (launch.request.seed != 0) {
        block = random_bits() % grid;
        do step = 1 + random_bits() % grid;
        while (std::gcd(step, grid) != 1);
    }
    for (u64 i = 0; i < grid; ++i, block = (block + step) % grid) run_cluster(block * cluster);
}

}  // namespace

void time_is_up() {
    char limit[32];
    snprintf(limit, sizeof limit, "%g", launch.request.limit_s);
    fatal("time limit", nullptr, "the launch took more than %s s; block %llu is at:%s", limit,
          (unsigned long long)launch.block, state_of_block().c_str());
}

void make_ready(u32 thread) {
    threads[thread].waiting = 0;
    ready.push_back(thread);
}

// A fiber cannot throw across its first frame: the launching thread throws for it.
void leave_launch() {
    left = true;
    if (current != &outside) switch_to(outside);
    throw LeftLaunch{};
}

void leave_block() { switch_to(outside); }

// splitmix64
u64 random_bits() {
    u64 z = (random_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

void run_launch(const Request& request) {
    make_stacks();
    const bool statistics = request.want_statistics != 0;
    launch = Launch{};
    launch.request = request;
    launch.threads = (u32)request.threads, launch.entries = launch.threads + AGENTS;
    launch.statistics = statistics;
    begin_statistics();
    begin_launch_memory();
    begin_launch_clusters();
    random_state = launch.request.seed * 0x2545f4914f6cdd1dull;
    constexpr u32 ODDS[] = {0, 8, 2};  // of an operation landing early: by the seed
    early_odds = ODDS[launch.request.seed % 3];
    blockDim[0] = launch.threads, gridDim[0] = (u32)launch.request.grid;
    blockDim[1] = blockDim[2] = gridDim[1] = gridDim[2] = 1;
    const Watchdog watchdog(launch.request.limit_s);
    try {
        run_blocks();
    } catch (const LeftLaunch&) {}
    end_launch_owners();
    current = nullptr;
}

}  // namespace core

using namespace core;

Thread& self() { return *current; }
u32 thread_id() { return current->id; }
u32 block_threads() { return launch.threads; }
u64 block_index() { return launch.block; }

void wait_on(WaitList& list, const WaitReason& reason) {
    Thread& thread = *current;
    list.threads.push_back(thread.id);
    thread.waiting = 1;
    thread.reason = reason;
    schedule();
}

void notify_all(WaitList& list) {
    for (const u32 id : list.threads) make_ready(id);
    list.threads.clear();
}

void yield() {
    if (!current->done) ready.push_back(current->id);
    schedule();
}

void preemption_point() {
    if (launch.request.seed == 0) return;
    if (early_odds && !pending.empty() && one_in(early_odds)) {
        const u32 index = random_below((u32)pending.size());
        if (pending[index].early) land(index);
    }
    if (one_in(4)) yield();
}

u32 random_below(u32 bound) { return (u32)((random_bits() >> 32) * bound >> 32); }
bool one_in(u32 n) { return random_below(n) == 0; }

Operation submit(const char* what, bool early, std::function<void()> land) {
    place_of_pending[++last_operation] = pending.size();
    pending.push_back({last_operation, what, early, std::move(land)});
    note_change();
    return last_operation;
}

bool landed(Operation operation) { return place_of_pending.count(operation) == 0; }

void land_now(Operation operation) {
    const auto found = place_of_pending.find(operation);
    if (found != place_of_pending.end()) land(found->second);
}

BlockHook::BlockHook(void (*begin)(), void (*end)(), std::string (*report)())
    : begin(begin), end(end), report(report), next(hooks) {
    hooks = this;
}

}  // namespace hc::emu
