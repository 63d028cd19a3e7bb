// Held rows on their way into the accumulator: the factors of their commit, their teachers, and their computation in order.
#ifndef HEADWATER_SERVER_HEADS_STEPS_HELD_ROWS_H_
#define HEADWATER_SERVER_HEADS_STEPS_HELD_ROWS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/heads/steps/pending_contribution.h"
#include "server/heads/steps/step_ledger.h"
#include "server/scheduler/sequencer.h"
#include "server/scheduler/waiting.h"

namespace headwater::heads {

// The arguments as the ledger keeps them. kInvalidField unless token factors are finite.
absl::StatusOr<CommitFactor> ToCommitFactor(const CommitArguments& arguments);

// Whether an engine will take held rows times these: kShapeMismatch, kInvalidField, kInvalidCombination.
absl::Status CheckCommit(const CommitArguments& arguments, const HeldRows& held);

// Computes held rows once more and adds them to the accumulators. By an operation that is admitted to all heads concerned.
absl::Status AddHeld(HeldRows held, const CommitArguments& arguments, LossEngine& engine);

// The teachers of held rows, which are computed again: each teacher must still exist, unchanged.
class HeldTeachers {
 public:
  HeldTeachers() = default;
  HeldTeachers(const HeldTeachers&) = delete;
  HeldTeachers& operator=(const HeldTeachers&) = delete;
  // Takes the teachers of `held` that still exist, and adds their uses to `needs`. In a turn.
  void Find(const HeldRows& held, scheduler::Needs& needs);
  // kHeadNotFound, kWeightVersionMismatch, and the errors of HeadCore::Check(). In a turn.
  absl::Status Check() const;

 private:
  std::vector<std::pair<std::shared_ptr<Head>, int64_t>> heads_;  // with the versions of their weights; null: deleted
};

// Adds the contributions whose turn has come, one after the other, each as an operation of its own. Does nothing outside
// deterministic mode. An engine failure, or a teacher that has changed or gone, makes the head LOST. After any other error the
// waiting contributions stay as they are. `yields`: stops at a head whose weights another operation writes, or is to write first.
absl::Status AddInOrder(Head& head, const scheduler::WaitLimits& limits, bool yields = false);
// AddInOrder() for several heads, except those whose weights are written. Returns only errors that made a head LOST. After other
// errors the next submission, decision, gradient or seal adds the rest. `limits` without a deadline: does not wait for a head.
absl::Status AddInOrder(const std::vector<Head*>& heads, const scheduler::WaitLimits& limits = scheduler::AsLongAsItTakes());

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_HELD_ROWS_H_
