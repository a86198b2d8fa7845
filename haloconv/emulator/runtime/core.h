// State that the runtime's core files share: fibers, the scheduler, shared memory's shadow, the running launch.
#pragma once

#include "runtime.h"

#define HC_LIKELY(x) __builtin_expect(!!(x), 1)
#define HC_UNLIKELY(x) __builtin_expect(!!(x), 0)

namespace hc::emu {

struct Thread {
    u32 id;
    bool done;
    void* stack_pointer;
    u64 stack_low;
    u32* clock;       // vector clock: what this thread knows of each thread and agent
    u32 fence_clock;  // generic writes up to this own time are visible to the async proxy
    u32 waiting;      // 1 while it waits for `reason`
    WaitReason reason;
    u64 collective_result;
};

}  // namespace hc::emu

namespace hc::emu {

// Hidden: the callbacks reach this state without the detour that exported variables need.
namespace core __attribute__((visibility("hidden"))) {

    constexpr u32 MAX_THREADS = 1024;
    constexpr u32 AGENTS = 64;
    constexpr u64 STACK_BYTES = 128 * 1024;        // of a fiber, a guard page on top
    constexpr u64 MAX_DYNAMIC_BYTES = 227 * 1024;  // dynamic shared memory of a block on sm_90
    constexpr u32 WINDOW_BASE = 1024;              // the first byte of a block's shared window, as on sm_90
    constexpr u64 MAX_SHARED_BYTES = 1024 * 1024;  // static and dynamic, what the shadow covers

    // ---- Epochs: who and when, in 32 bits: 2 bits halves of the word, 11 bits thread or agent, 19 bits its clock ----
    constexpr u32 CLOCK_BITS = 19;
    constexpr u32 CLOCK_MASK = (1u << CLOCK_BITS) - 1;
    constexpr u32 AGENT_MASK = 0x7ffu;
    constexpr u32 HALVES_SHIFT = 30;

    inline u32 epoch(u32 agent, u32 clock, u32 halves) { return halves << HALVES_SHIFT | agent << CLOCK_BITS | clock; }
    inline u32 agent_of(u32 epoch) { return epoch >> CLOCK_BITS & AGENT_MASK; }
    inline bool ordered(const u32* clock, u32 epoch) { return clock[agent_of(epoch)] >= (epoch & CLOCK_MASK); }

    // Each entry of `mine` becomes the later of the two. Signed, because SSE2 compares signed numbers alone.
    inline void take_later(u32* __restrict mine, const u32* __restrict theirs, u32 count) {
        for (u32 i = 0; i < count; ++i) mine[i] = (u32)((int)mine[i] > (int)theirs[i] ? (int)mine[i] : (int)theirs[i]);
    }

    // ---- Shadow of one 4-byte word of shared memory ----
    enum WordState : u8 { UNWRITTEN_LOW = 1, UNWRITTEN_HIGH = 2, WRITE_IN_FLIGHT = 4, RESERVED = 8 };
    constexpr u32 READ_SLOTS = 5;
    struct Word {
        u32 write[2];           // last writer of each half
        u32 reads[READ_SLOTS];  // readers since, the latest of each class of warps
        u8 read_mask;           // slots in use
        u8 state;
        u8 reads_in_flight;
        u8 unused;
    };
    static_assert(sizeof(Word) == 32, "a word's shadow is half a cache line");

    // ---- The running launch ----
    struct Region {
        u64 begin, end;
        u64 writable;
    };
    struct Request {  // filled by Python (haloconv/emulator/runtime.py)
        void (*entry)(const void* const* arguments);
        const void* const* arguments;
        const Region* regions;
        u64 region_count;
        u64 seed;
        double limit_s;
        u64 grid, threads, dynamic_bytes, cluster;
        u64 want_statistics, one_finding;
    };

    struct Range {
        u64 begin = 0, bytes = 0;
        bool holds(u64 address) const { return address - begin < bytes; }
    };

    struct Launch {
        Request request;
        Range dynamic_smem, static_smem, module;
        u64 block;
        u32 threads, entries;  // entries of a vector clock
        u32 alive;
        bool statistics;
        volatile bool expired;
    };
    extern Launch launch;
    extern Thread threads[MAX_THREADS];
    extern Thread* current;

    // What the callbacks look at first. All but the stack is empty when statistics or the time limit want the slow path.
    struct FastPath {
        u64 stack_low, stack_bytes;
        u64 dynamic_begin, dynamic_bytes;
        u64 region_begin, region_bytes;
        u32* region_owners;  // nullptr unless it is writable
        const u32* clock;
        u32 epoch;  // of the current thread, both halves
        u32 slot;   // its read slot
    };
    extern FastPath fast;
    void refresh_fast_path();    // after the current thread or its clock changed
    void tick(Thread & thread);  // the thread's time goes on
    void slow_accesses();        // from now on every access takes the slow path

    // shadow.cpp, clocks.cpp
    void begin_block_shadow(u64 words);
    void begin_block_agents();
    u32 agent_tick(u32 agent);  // the agent's clock after one more write

    // memory.cpp
    void begin_launch_memory();
    Range static_smem_of(const void* entry);
    void begin_block_memory();
    bool in_block_memory(u64 address, u64 bytes);  // all of it in static, or all in dynamic shared memory
    std::string whereabouts(u64 address);          // of an address that is in none of the right places
    void check_alignment(u64 address, u64 bytes, u64 align, bool write, Site site);
    void check_time();
    u64 shared_window_bytes();          // of a block, from WINDOW_BASE on
    void copy_window(char* to);         // the block's shared memory as it is now
    Word* shadow_of(u64 address);       // of a shared address, else nullptr
    std::string place_of(u64 address);  // "dynamic_smem + 64 (shared address 0x440)"

    // cluster.cpp
    void begin_launch_clusters();
    void begin_cluster();
    void begin_block_cluster(bool first_run);
    void end_block_cluster();
    void end_cluster();
    void thread_left_cluster();
    bool runs_again();  // the block ends at its first cluster barrier, to run again from its begin
    bool in_peer_memory(u64 address);
    void peer_access(u64 address, u64 bytes, bool write, Site site);

    // owners.cpp
    void begin_launch_owners();
    void end_launch_owners();
    u32* owners_of(u64 address);  // of the byte at a writable global address, and of those behind it in its region
    void report_overlap(u32 before, u64 bytes, u64 address, Site site);

    // The running block writes these bytes: a finding if another one has.
    inline void claim(u32 * owners, u64 bytes, u64 address, Site site) {
        const u32 own = (u32)launch.block + 1;
        u32 other = 0;
        for (u64 i = 0; i < bytes; ++i) {
            const u32 before = owners[i];
            other = before != 0 && before != own ? before : other;
            owners[i] = own;
        }
        if (HC_UNLIKELY(other)) report_overlap(other, bytes, address, site);
    }

    // scheduler.cpp
    void run_launch(const Request& request);
    [[noreturn]] void leave_launch();  // from any fiber: end the run
    void leave_block();                // from any fiber: end the block, wherever its threads are
    [[noreturn]] void time_is_up();    // the wall-clock limit is reached
    void make_ready(u32 thread);

    // collectives.cpp
    void begin_block_collectives();
    void thread_left();  // the current thread is done: barriers count one less

    // findings.cpp
    void begin_findings();
    std::string site_text(Site site);
    void add_deadlock(const std::string& report);

    // statistics.cpp
    void begin_statistics();
    void hold_statistics(bool hold);  // while held nothing counts
    void end_block_statistics();
    void count_access(u64 address, u32 bytes, bool write, bool shared, Site site);

    u64 random_bits();
    extern BlockHook* hooks;

}  // namespace core

}  // namespace hc::emu
