// The emulator's runtime as its own sources see it (runtime/*.cpp): threads, scheduling, asynchronous operations,
// shared memory and its shadow, happens-before, findings, statistics.
//
// Kernel sources never include this header; they see the declarations of emulator.h only. Everything here runs without
// instrumentation. One kernel runs at a time in a process, and one block of it at a time, each CUDA thread as a fiber.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hc::emu {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// A place in the kernel's machine code: the return address of the runtime function that the kernel called. A function
// that the kernel calls takes it first thing with HC_EMU_SITE; Python tells its file and line.
using Site = const void*;
#define HC_EMU_SITE __builtin_return_address(0)

// ---- Threads ----

struct Thread;        // one CUDA thread of the running block
Thread& self();       // the thread that runs now
u32 thread_id();      // its linear number in the block: warp = id / 32, lane = id % 32, warpgroup = id / 128
u32 block_threads();  // threads of the block
u64 block_index();    // linear number of the block in the grid

// ---- Waiting ----
// Functions that wait or yield may run any other thread meanwhile: keep no reference into a container across them.

// What a thread waits for, as a deadlock report shows it: "waits at <what> (<describe(object)>)".
struct WaitReason {
    const char* what;
    Site site;
    std::string (*describe)(const void* object) = nullptr;
    const void* object = nullptr;
};

struct WaitList {
    std::vector<u32> threads;
};
void wait_on(WaitList& list, const WaitReason& reason);  // blocks the current thread until notify_all(list)
void notify_all(WaitList& list);                         // makes every waiter runnable, in no particular order

template <class Ready>
void wait_until(WaitList& list, const WaitReason& reason, Ready ready) {
    while (!ready()) wait_on(list, reason);
}

void yield();             // lets the scheduler choose another thread
void preemption_point();  // the same, only if the seed says so; may also land a pending operation

// All `count` threads that call with the same Meeting meet; the last to come runs `once`, then all go on. Nobody's
// memory accesses are ordered by it unless `ordered`: then it is a barrier for happens-before as well.
struct Clock {  // a vector clock; empty is "nothing has happened"
    std::vector<u32> entries;
};
struct Meeting {
    u32 arrived = 0;
    u64 generation = 0;
    WaitList waiters;
    Clock gathering, met;
};
void meet(Meeting& meeting, u32 count, bool ordered, const WaitReason& reason, const std::function<void()>& once);
Meeting& warpgroup_meeting();  // of the current thread's warpgroup; fresh at each block

// ---- The seed ----

u32 random_below(u32 bound);  // uniform in [0, bound)
bool one_in(u32 n);           // true once in n

// ---- Asynchronous operations ----
// submit() queues `land`, which the runtime calls once: when every thread is blocked (the latest moment), at a random
// earlier preemption point if `early` and the seed's policy allow, or when land_now() forces it. Landing may run in
// any thread's context or in none: do not use self() in it; capture what it needs.

using Operation = u64;  // 0 is none
Operation submit(const char* what, bool early, std::function<void()> land);
bool landed(Operation operation);
void land_now(Operation operation);  // no effect if it has landed

// ---- Happens-before ----

void release(Clock& clock);                   // what the current thread did so far is in `clock`
void acquire(const Clock& clock);             // the current thread comes after all that is in `clock`
void merge(Clock& into, const Clock& from);   // into covers both
void release_agent(Clock& clock, u32 agent);  // all that the agent wrote so far is in `clock`
u32 new_agent();                              // an asynchronous writer, e.g. one per mbarrier; small numbers are reused
void clock_of(const Thread& thread, Clock& clock);  // a copy of the thread's clock, own entry included

// ---- Shared memory ----
// Addresses are host pointers. In a kernel's 32-bit shared window, static variables come first, then dynamic memory.

bool is_shared(const void* pointer);
u32 shared_address(const void* pointer, Site site);       // ends the run unless the pointer is into shared memory
void* shared_pointer(u32 address, u32 bytes, Site site);  // ends the run unless [address, address + bytes) exists

// By the current thread, now, through the generic proxy, in a wrapper whose own accesses are not instrumented
// (ldmatrix, stmatrix, mbarrier words excepted). Bounds, alignment to `align`, unwritten words, races.
void shared_read(const void* from, u32 bytes, u32 align, Site site);
void shared_write(void* to, u32 bytes, u32 align, Site site);

// By an asynchronous engine. `begin` at issue, in the issuing thread: checks bounds, alignment, order after conflicting
// accesses, and (async_read_begin, if `proxy`) that generic writes of the words were fenced by their writers; until
// `end`, a conflicting access of anyone is a finding.
void async_read_begin(const void* from, u32 bytes, u32 align, bool proxy, Site site);
void async_read_end(const void* from, u32 bytes, u32 reader_thread,
                    Site site);  // the read counts as reader_thread's, now
void async_write_begin(void* to, u32 bytes, u32 align, Site site);
void async_write_end(void* to, u32 bytes, u32 agent, Site site);             // written by new_agent()'s number, now
void async_write_end_by_thread(void* to, u32 bytes, u32 thread, Site site);  // written by a thread (cp.async), now

void fence_proxy_async();  // the current thread's earlier generic writes are visible to the async proxy

// Words that hold a synchronisation object (an mbarrier): the kernel's plain reads and writes of them are findings.
void reserve_shared(const void* word, u32 bytes, const char* owner);
void unreserve_shared(const void* word, u32 bytes);

// ---- Global memory ----

// Ends the run unless [pointer, pointer + bytes) lies inside one registered region (and is writable, for a write).
void check_global(const void* pointer, u64 bytes, bool write, u32 align, const char* what, Site site);

// The running block writes these bytes, which check_global has passed, by other means than an atomic operation: a finding
// if another block of the launch has written one of them.
void written_by_block(const void* pointer, u64 bytes, Site site);

// ---- Findings ----
// A finding is (kind, site, thread, block, sentence). The same kind at the same site is kept once and counted.

void finding(const char* kind, Site site, const char* format, ...) __attribute__((format(printf, 3, 4)));
[[noreturn]] void fatal(const char* kind, Site site, const char* format, ...) __attribute__((format(printf, 3, 4)));

// ---- Statistics ----

enum Counter : u32 {
    GLOBAL_READ_BYTES,
    GLOBAL_WRITE_BYTES,
    SHARED_READ_BYTES,
    SHARED_WRITE_BYTES,
    ASYNC_READ_BYTES,   // global -> shared by cp.async, bulk copies and tensor maps
    ASYNC_WRITE_BYTES,  // shared -> global
    MULTIPLIES,         // of mma and wgmma
    COUNTERS
};
void count(Counter counter, u64 amount);

// ---- Hooks of a primitive's source file ----
// static BlockHook hook{begin, end, report}: begin() before each block, end() after its last thread (check for what is
// still pending there), report() adds lines to a deadlock report (state of each mbarrier). Each may be null.
struct BlockHook {
    void (*begin)();
    void (*end)();
    std::string (*report)();
    BlockHook* next;
    BlockHook(void (*begin)(), void (*end)(), std::string (*report)());
};

}  // namespace hc::emu
