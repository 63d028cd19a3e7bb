// Decisions on computed micro-batches: committed to all their heads, or discarded.
#ifndef HEADWATER_SERVER_HEADS_STEPS_DECIDE_H_
#define HEADWATER_SERVER_HEADS_STEPS_DECIDE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "server/heads/session_registry.h"
#include "server/heads/steps/pending_contribution.h"
#include "server/heads/steps/step_calls.h"
#include "server/scheduler/waiting.h"

namespace headwater::observability {
class BusyClock;
}

namespace headwater::heads {

// Adds the contribution to all its heads, or to none. `targets` must be exactly its heads (kInvalidCombination otherwise). True if
// this call committed it, false if an equal call had before. kNotSessionOwner if another session than `session` owns it.
// kInvalidCombination for token factors of a contribution that is not HELD, kShapeMismatch for their number. kWeightVersionMismatch
// if it is HELD and a teacher's weights have changed. `busy` (may be null) counts the engine's work for it, but not the wait for
// the heads.
absl::StatusOr<bool> Commit(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                            const CommitArguments& arguments, const std::optional<SessionId>& session,
                            observability::BusyClock* busy = nullptr,
                            const scheduler::WaitLimits& limits = scheduler::AsLongAsItTakes());
// True if a contribution was dropped. An attempt higher than the contribution's needs no session.
absl::StatusOr<bool> Discard(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                             const std::optional<SessionId>& session,
                             const scheduler::WaitLimits& limits = scheduler::AsLongAsItTakes());

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_DECIDE_H_
