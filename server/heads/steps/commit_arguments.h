// The factors of a commit: checked, digested, and carried out by the engine.
#ifndef HEADWATER_SERVER_HEADS_STEPS_COMMIT_ARGUMENTS_H_
#define HEADWATER_SERVER_HEADS_STEPS_COMMIT_ARGUMENTS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/heads/steps/pending_contribution.h"
#include "server/heads/steps/step_ledger.h"

namespace headwater::heads {

// The arguments as the ledger keeps them. kInvalidField unless token factors are finite.
absl::StatusOr<CommitFactor> ToCommitFactor(const CommitArguments& arguments);

// Whether an engine will take held rows times these: kShapeMismatch, kInvalidField, kInvalidCombination.
absl::Status CheckCommit(const CommitArguments& arguments, const HeldRows& held);

// Computes held rows once more and adds them to the accumulators. By an operation that is admitted to all heads concerned.
absl::Status AddHeld(HeldRows held, const CommitArguments& arguments, LossEngine& engine);

// Adds a contribution that is staged, or one that is held if CheckCommit() takes the arguments. By an
// operation that is admitted to all heads concerned.
absl::Status AddPending(const PendingContribution& pending, const CommitArguments& arguments, LossEngine& engine);

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_COMMIT_ARGUMENTS_H_
