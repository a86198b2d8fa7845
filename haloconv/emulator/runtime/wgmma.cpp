// wgmma as asynchronous instructions of a warpgroup.
//
// Issue only queues an instruction and fills d with NaN. A warp's quarter (16 rows) is computed when its own wait_group
// forces it: only then are operands read and registers written. Shared memory counts as read from the commit to
// that wait; the bytes are taken once, for the first warp that computes.
// Sums are the hardware's to the bit (wgmma_operands.cpp): tests/conformance compares them with those of an H200.

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <memory>

#include "wgmma.h"

namespace hc::emu {

namespace {

constexpr u32 MAX_WARPS = 32, MAX_GROUPS = MAX_WARPS / 4;
constexpr u32 ROWS = 16;  // of d, by each warp

struct Shape {
    u32 n;
    MatrixType type;
    bool a_mn_major, b_mn_major;
    explicit Shape(int code)
        : n(code & 0xffff), type(MatrixType(code >> 16 & 15)), a_mn_major(code >> 20 & 1), b_mn_major(code >> 21 & 1) {}
    u32 depth() const { return type == TF32 ? 8 : 16; }
};

// An instruction as the whole warpgroup has to issue it, and its operands once they are read.
struct Instruction {
    u64 desc_a, desc_b;
    int shape;
    bool accumulate, from_registers;
    Site site;
    std::vector<float> a, b;  // [64][depth], [depth][n]
    u32 warps_done = 0;

    bool same_as(const Instruction& other) const {
        return desc_b == other.desc_b && shape == other.shape && accumulate == other.accumulate &&
               from_registers == other.from_registers && (from_registers || desc_a == other.desc_a);
    }
};

// The accumulators of a warp that instructions under way will write: one d[] in each lane.
struct Tile {
    std::vector<float> sums;  // [16][n]
    float* d[32] = {};
    u32 n = 0;
    u64 last = 0;  // number of the youngest instruction that writes it, from 1
};

struct WarpInstruction {
    Instruction common;
    u32 tile;
    u32 lanes = 0;                          // that issued it
    std::unique_ptr<u32[][4]> a_registers;  // of 32 lanes
};

struct Range {
    const void* from;
    u32 bytes;
    Site site;
};

struct Group {
    u64 last;  // number of its youngest instruction, 0 if it has none
    std::vector<Range> reads;
};

struct Lane {
    u64 issued = 0;
    u32 tiles_opened = 0;
    bool fenced = false;  // a fence since ordinary code last had the accumulators
    u64 fences = 0;
    std::vector<std::pair<float*, u32>> open;  // d and its tile, under way
    struct Fragment {
        u32 values[4];
        u64 fences;
        u64 number;  // of that instruction
    };
    std::map<const u32*, Fragment> fragments;  // registers of a as an instruction last used them
};

struct Warp {
    std::deque<WarpInstruction> queue;  // issued and not computed
    u64 computed = 0, committed = 0;    // numbers of instructions
    std::deque<Group> groups;           // committed and not waited for
    std::map<u32, Tile> tiles;
    Lane lanes[32];
    Clock reads;  // what the last wait completed
};

struct Warpgroup {
    std::deque<Instruction> instructions;  // not computed by all four warps
    u64 dropped = 0;                       // computed by all
    WaitList waiters;                      // for the other warps to commit
};

Warp warps[MAX_WARPS];
Warpgroup warpgroups[MAX_GROUPS];

Warp& own_warp() { return warps[warp_id()]; }
Lane& own_lane() { return own_warp().lanes[lane_id()]; }
Warpgroup& own_warpgroup() { return warpgroups[warp_id() / 4]; }

void begin_block() {
    for (Warp& warp : warps) warp = {};
    for (Warpgroup& group : warpgroups) group = {};
}

void end_block() {
    for (u32 i = 0; i < MAX_WARPS; ++i)
        if (!warps[i].queue.empty())
            finding("unfinished wgmma", warps[i].queue.front().common.site,
                    "warp %u never waited for %zu wgmma instructions", i, warps[i].queue.size());
}

std::string report() {
    std::string text;
    for (u32 i = 0; i < MAX_WARPS; ++i)
        if (!warps[i].queue.empty())
            text += "warp " + std::to_string(i) + ": " + std::to_string(warps[i].queue.size()) + " wgmma under way, " +
                    std::to_string(warps[i].groups.size()) + " groups committed\n";
    return text;
}

BlockHook hook{begin_block, end_block, report};

// ---- Issue ----

u32 sum_index(u32 lane, u32 element, u32 n) {
    return (lane / 4 + element / 2 % 2 * 8) * n + element / 4 * 8 + lane % 4 * 2 + element % 2;
}

// The tile that d belongs to: the one under way, or a new one that starts from d's values.
u32 tile_of(Warp& warp, Lane& lane, float* d, const Shape& shape, bool accumulate, Site site) {
    for (const auto& [open, tile] : lane.open)
        if (open == d) {
            if (warp.tiles[tile].n != shape.n)
                finding("wgmma", site, "d is still being written by an instruction of n = %u, now n = %u",
                        warp.tiles[tile].n, shape.n);
            return tile;
        }
    if (!lane.fenced) finding("missing fence", site, "no wgmma.fence between ordinary code that owns d and this wgmma");
    const u32 number = lane.tiles_opened++;
    Tile& tile = warp.tiles[number];
    if (tile.sums.empty()) tile.sums.resize(ROWS * shape.n), tile.n = shape.n;
    tile.d[lane_id()] = d;
    for (u32 i = 0; i < shape.n / 2; ++i) {
        if (accumulate) tile.sums[sum_index(lane_id(), i, shape.n)] = d[i];
        d[i] = std::numeric_limits<float>::quiet_NaN();
    }
    lane.open.push_back({d, number});
    return number;
}

void check_fragment(const Warp& warp, Lane& lane, const u32* a, Site site) {
    const auto found = lane.fragments.find(a);
    const bool rewritten = found == lane.fragments.end() || std::memcmp(found->second.values, a, 16);
    const u64 fences_then = found == lane.fragments.end() ? 0 : found->second.fences;
    if (rewritten && lane.fences == fences_then)
        finding("missing fence", site, "no wgmma.fence since ordinary code wrote the registers of a");
    if (rewritten && found != lane.fragments.end() && found->second.number > warp.computed)
        finding("wgmma", site, "the registers of a were written while a wgmma still under way reads them");
    Lane::Fragment& now = lane.fragments[a];
    std::memcpy(now.values, a, 16);
    now.fences = lane.fences;
    now.number = lane.issued + 1;
}

void issue(float* d, const u32* a, const Instruction& instruction) {
    const Site site = instruction.site;
    if ((warp_id() / 4 + 1) * 128 > block_threads())
        fatal("wgmma", site, "warp %u is in no complete warpgroup of 128 threads", warp_id());
    Warp& warp = own_warp();
    Lane& lane = own_lane();
    const Shape shape(instruction.shape);
    const u32 tile = tile_of(warp, lane, d, shape, instruction.accumulate, site);
    if (a) check_fragment(warp, lane, a, site);
    const u64 number = ++lane.issued, index = number - warp.computed - 1;
    if (index == warp.queue.size()) warp.queue.push_back({instruction, tile, 0, nullptr});
    WarpInstruction& queued = warp.queue[index];
    if (!queued.common.same_as(instruction) || queued.tile != tile)
        fatal("wgmma", site, "lane %u of warp %u issues another wgmma than the lanes before it", lane_id(), warp_id());
    ++queued.lanes;
    warp.tiles[tile].last = std::max(warp.tiles[tile].last, number);
    if (!a) return;
    if (!queued.a_registers) queued.a_registers.reset(new u32[32][4]);
    std::memcpy(queued.a_registers[lane_id()], a, 16);
}

// ---- Commit: the last lane of the warp opens the reads of the group ----

void add_reads(ChunkSet& set, const Instruction& instruction, u32 warp) {
    const Shape shape(instruction.shape);
    if (!instruction.from_registers)
        set.add(Operand(instruction.desc_a, shape.type, shape.a_mn_major, 64), warp % 4 * ROWS, ROWS);
    set.add(Operand(instruction.desc_b, shape.type, shape.b_mn_major, shape.n), 0, shape.n);
}

void check_operand(const Operand& operand, char name, Site site) {
    if (operand.base_offset)
        finding("wgmma", site, "descriptor of %c: base offset %u; only 0 is modelled", name, operand.base_offset);
    if (operand.stride == 0 && operand.outers() > 8)
        finding("wgmma", site, "descriptor of %c: groups of 8 are 0 bytes apart", name);
}

// All four warps of a warpgroup issue the same instructions in the same order.
void share(Warpgroup& group, u64 number, const Instruction& instruction) {
    const u64 index = number - group.dropped - 1;
    if (index == group.instructions.size()) {
        const Shape shape(instruction.shape);
        if (!instruction.from_registers)
            check_operand(Operand(instruction.desc_a, shape.type, shape.a_mn_major, 64), 'a', instruction.site);
        check_operand(Operand(instruction.desc_b, shape.type, shape.b_mn_major, shape.n), 'b', instruction.site);
        group.instructions.push_back(instruction);
    }
    if (!group.instructions[index].same_as(instruction))
        fatal("wgmma", instruction.site, "warp %u issues another wgmma than its warpgroup", warp_id());
}

void commit(Warp& warp, Site site) {
    const u64 issued = warp.computed + warp.queue.size();
    Group group{issued > warp.committed ? issued : 0, {}};
    ChunkSet chunks;
    for (u64 number = warp.committed + 1; number <= issued; ++number) {
        const WarpInstruction& queued = warp.queue[number - warp.computed - 1];
        if (queued.lanes != 32)
            fatal("wgmma", queued.common.site, "only %u lanes of warp %u issue this wgmma", queued.lanes, warp_id());
        share(own_warpgroup(), number, queued.common);
        add_reads(chunks, queued.common, warp_id());
    }
    const Site from = group.last ? warp.queue.back().common.site : site;
    chunks.for_each_range([&](u32 address, u32 bytes) {
        const void* const pointer = shared_pointer(address, bytes, from);
        async_read_begin(pointer, bytes, 16, true, from);
        group.reads.push_back({pointer, bytes, from});
    });
    warp.committed = issued;
    warp.groups.push_back(std::move(group));
    notify_all(own_warpgroup().waiters);
}

// ---- Wait: the last lane of the warp computes ----

void read_operands(Instruction& instruction) {
    const Shape shape(instruction.shape);
    const u32 depth = shape.depth();
    instruction.b.resize(depth * shape.n);
    read_operand(Operand(instruction.desc_b, shape.type, shape.b_mn_major, shape.n), instruction.b.data(), 1, shape.n,
                 instruction.site);
    if (instruction.from_registers) return;
    instruction.a.resize(64 * depth);
    read_operand(Operand(instruction.desc_a, shape.type, shape.a_mn_major, 64), instruction.a.data(), depth, 1,
                 instruction.site);
}

// The fragment of a in registers as 16 rows.
void gather_rows(const WarpInstruction& queued, const Shape& shape, float* rows) {
    const u32 depth = shape.depth(), per_register = depth / 8;
    for (u32 lane = 0; lane < 32; ++lane)
        for (u32 i = 0; i < 4; ++i)
            for (u32 e = 0; e < per_register; ++e) {
                const u32 row = lane / 4 + i % 2 * 8, k = lane % 4 * per_register + i / 2 * (depth / 2) + e;
                rows[row * depth + k] = element(&queued.a_registers[lane][i], e, shape.type);
            }
}

void compute_oldest(Warp& warp) {
    const WarpInstruction queued = std::move(warp.queue.front());
    warp.queue.pop_front();
    ++warp.computed;
    Warpgroup& group = own_warpgroup();
    Instruction& instruction = group.instructions[warp.computed - group.dropped - 1];
    const Shape shape(instruction.shape);
    if (instruction.b.empty()) read_operands(instruction);
    Tile& tile = warp.tiles[queued.tile];
    if (!instruction.accumulate) std::fill(tile.sums.begin(), tile.sums.end(), 0.0f);
    float from_registers[ROWS * 16];
    const float* rows = from_registers;
    if (instruction.from_registers)
        gather_rows(queued, shape, from_registers);
    else
        rows = instruction.a.data() + warp_id() % 4 * ROWS * shape.depth();
    multiply_rows(tile.sums.data(), rows, instruction.b.data(), shape.n, shape.depth());
    count(MULTIPLIES, u64(ROWS) * shape.n * shape.depth());
    if (++instruction.warps_done < 4) return;
    while (!group.instructions.empty() && group.instructions.front().warps_done == 4) {
        group.instructions.pop_front();
        ++group.dropped;
    }
}

// Registers of d whose last instruction is done hold their values again, and are ordinary code's.
void write_back(Warp& warp) {
    for (auto at = warp.tiles.begin(); at != warp.tiles.end();) {
        const auto& [number, tile] = *at;
        if (tile.last > warp.computed) {
            ++at;
            continue;
        }
        for (u32 id = 0; id < 32; ++id) {
            for (u32 i = 0; i < tile.n / 2; ++i) tile.d[id][i] = tile.sums[sum_index(id, i, tile.n)];
            Lane& lane = warp.lanes[id];
            lane.fenced = false;
            const auto mine = [number = number](const auto& entry) { return entry.second == number; };
            lane.open.erase(std::remove_if(lane.open.begin(), lane.open.end(), mine), lane.open.end());
        }
        at = warp.tiles.erase(at);
    }
}

void complete(Warp& warp, std::size_t groups) {
    for (; groups; --groups) {
        Group group = std::move(warp.groups.front());
        warp.groups.pop_front();
        while (warp.computed < group.last) compute_oldest(warp);
        for (const Range& read : group.reads) async_read_end(read.from, read.bytes, thread_id(), read.site);
    }
    write_back(warp);
    warp.reads.entries.clear();
    release(warp.reads);
}

// The number of the youngest instruction that a wait for all but `youngest` groups completes, 0 if none.
u64 last_of(const Warp& warp, std::size_t done) {
    u64 last = 0;
    for (std::size_t i = 0; i < done; ++i) last = std::max(last, warp.groups[i].last);
    return last;
}

bool all_committed(u64 number) {
    const u32 first = warp_id() / 4 * 4;
    for (u32 i = first; i < first + 4; ++i)
        if (warps[i].committed < number) return false;
    return true;
}

}  // namespace

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

void hc_emu_wgmma_fence() {
    Lane& lane = own_lane();
    lane.fenced = true;
    ++lane.fences;
    preemption_point();
}

void hc_emu_wgmma_ss(float* d, unsigned long long desc_a, unsigned long long desc_b, bool accumulate, int shape) {
    const Site site = HC_EMU_SITE;
    issue(d, nullptr, {desc_a, desc_b, shape, accumulate, false, site, {}, {}});
}

void hc_emu_wgmma_rs(float* d, const unsigned* a, unsigned long long desc_b, bool accumulate, int shape) {
    const Site site = HC_EMU_SITE;
    issue(d, a, {0, desc_b, shape, accumulate, true, site, {}, {}});
}

void hc_emu_wgmma_commit_group() {
    const Site site = HC_EMU_SITE;
    Warp& warp = own_warp();
    meet_warp("wgmma.commit_group", site, [&] { commit(warp, site); });
}

void hc_emu_wgmma_wait_group(int youngest) {
    const Site site = HC_EMU_SITE;
    Warp& warp = own_warp();
    const std::size_t done = warp.groups.size() > std::size_t(youngest) ? warp.groups.size() - youngest : 0;
    const u64 last = last_of(warp, done);
    wait_until(own_warpgroup().waiters, {"the other warps of the warpgroup to issue their wgmma", site},
               [&] { return all_committed(last); });
    meet_warp("wgmma.wait_group", site, [&] { complete(warp, done); });
    acquire(warp.reads);
}

}  // extern "C"
