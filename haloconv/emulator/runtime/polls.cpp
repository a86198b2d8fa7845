// Polls of a barrier: rounds of a warp, their patience, and the deadlock of threads that only poll.
#include "polls.h"

#include <algorithm>

namespace hc::emu::core {

u64 changes, next_refusal;

namespace {

constexpr u64 FOREVER = ~0ull;
constexpr u32 SPURIOUS = 16;       // one round in so many is false for nothing
constexpr u32 MOST_PATIENCE = 32;  // changes that a round sits out, if it gives up by itself
constexpr u32 IDLE_ROUNDS = 100;   // polls that change nothing before it is a deadlock: some kernels count them

std::vector<Poll*> waiting;
u64 changes_before;  // at the last round in which all gave up
u32 idle_rounds;

}  // namespace

void begin_block_polls() {
    waiting.clear();
    changes = changes_before = 0;
    idle_rounds = 0;
    next_refusal = FOREVER;
}

u64 join(Poll& poll, bool ended) {
    const u32 lane = 1u << current->id % 32;
    if (poll.round && !(poll.lanes & lane)) {
        poll.lanes |= lane;
        return poll.round;
    }
    ++poll.round;
    poll.lanes = lane;
    poll.patience = FOREVER;
    if (launch.request.seed == 0) return poll.round;
    if (ended && one_in(SPURIOUS)) poll.refused = poll.round;
    if (!ended && one_in(2)) poll.patience = changes + 1 + random_below(MOST_PATIENCE);
    return poll.round;
}

void wait_in(Poll& poll, const WaitReason& reason) {
    if (!poll.listed) waiting.push_back(&poll);
    poll.listed = true;
    if (poll.patience < next_refusal) next_refusal = poll.patience;
    ++poll.inside;
    wait_on(poll.waiters, reason);
    --poll.inside;
}

void forget(Poll& poll) {
    if (poll.listed) waiting.erase(std::find(waiting.begin(), waiting.end(), &poll));
}

bool polls_wait() {
    for (const Poll* poll : waiting)
        if (!poll->waiters.threads.empty()) return true;
    return false;
}

void refuse_polls_until(u64 change) {
    next_refusal = FOREVER;
    size_t kept = 0;
    for (Poll* poll : waiting) {
        if (poll->patience <= change && !poll->waiters.threads.empty()) {
            poll->refused = poll->round;
            notify_all(poll->waiters);
        }
        poll->listed = !poll->waiters.threads.empty();
        if (!poll->listed) continue;
        waiting[kept++] = poll;
        if (poll->patience < next_refusal) next_refusal = poll->patience;
    }
    waiting.resize(kept);
}

bool refuse_all_polls() {
    idle_rounds = changes == changes_before ? idle_rounds + 1 : 0;
    changes_before = changes;
    if (idle_rounds > IDLE_ROUNDS || !polls_wait()) return false;
    refuse_polls_until(FOREVER);
    return true;
}

}  // namespace hc::emu::core
