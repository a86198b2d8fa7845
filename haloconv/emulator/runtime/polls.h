// Polls of a barrier (try_wait) that give up: which do, when, and when polling without end is a deadlock.
#pragma once

#include "core.h"

namespace hc::emu::core {

// What changes the block's state other than memory: arrivals, operations issued and landed, threads that leave.
// Patience is counted in these: where nothing changes, nobody gives up before everybody waits.
extern u64 changes;
inline void note_change() { ++changes; }

// One warp's polls of one barrier at one place. Lanes that come there together execute one instruction and must get one
// answer: each joins the round under way, or opens the next one if it has been in this one. Not to be moved.
struct Poll {
    u64 round = 0;
    u64 refused = 0;   // the last round that gave up: false for each of its lanes, also for those still to come
    u64 patience = 0;  // the round gives up at so many changes
    u32 lanes = 0;     // in this round
    u32 inside = 0;    // lanes that have yet to get their answer
    bool listed = false;
    WaitList waiters;
};

u64 join(Poll& poll, bool ended);                    // the lane's round; `ended`: the answer should be true
void wait_in(Poll& poll, const WaitReason& reason);  // until the barrier's phase ends or the round is refused
inline bool is_refused(const Poll& poll, u64 round) { return poll.refused >= round; }

void begin_block_polls();
void forget(Poll& poll);  // before its barrier goes
bool polls_wait();        // some lane waits in a poll
bool refuse_all_polls();  // every thread waits: false if no poll does, or if polling on has changed nothing
void refuse_polls_until(u64 change);

extern u64 next_refusal;  // the least patience of the polls that wait
inline void refuse_polls_that_are_due() {
    if (HC_UNLIKELY(changes >= next_refusal)) refuse_polls_until(changes);
}

}  // namespace hc::emu::core
