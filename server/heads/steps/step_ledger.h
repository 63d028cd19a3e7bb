// StepLedger: the state machine of one head's steps and micro-batches. Pure bookkeeping: no tensors, no locks, no clock.
//
//   step:          OPEN --Seal--> SEALED --Close(APPLIED | DISCARDED | REPLACED)--> step + 1 is OPEN
//   micro-batch:   Begin --> IN_PROGRESS --FinishCommitted--> COMMITTED
//                                        --FinishStaged-----> STAGED --FinishCommit--> COMMITTED
//                                        |                           --Discard-------> DISCARDED (tombstone)
//                                        |                           --Supersede-----> NONE (fenced below the higher attempt)
//                                        --Abort------------> forgotten, except its fence and tombstone
//
// STAGED means computed and undecided, whatever the form: STAGED in a slot, or HELD as rows.
//
// A micro-batch whose rows are still on their way begins provisionally, without a digest; SetDigest() is its point of no return.
// Several micro-batches may be in progress at once.
//
// Every method either changes the state as its name says and returns OK, or returns an error and changes nothing.
// Not thread-safe: for turns.
#ifndef HEADWATER_SERVER_HEADS_STEPS_STEP_LEDGER_H_
#define HEADWATER_SERVER_HEADS_STEPS_STEP_LEDGER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::heads {

// The values are those of headwater.v1.StepState.
enum class StepState : int32_t { kOpen = 1, kSealed = 2, kApplied = 3, kDiscarded = 4, kReplaced = 5 };

// The values are those of headwater.v1.ContributionState.
enum class ContributionState : int32_t { kNone = 0, kInProgress = 1, kStaged = 2, kCommitted = 3, kDiscarded = 4 };

// The values are those of headwater.v1.ContributionForm.
enum class ContributionForm : int32_t { kNone = 0, kDirect = 1, kStaged = 2, kHeld = 3 };

// Why an undecided micro-batch is gone: a call, the end of its session, or another of its heads, which dropped it.
enum class DiscardedBy : uint8_t { kCall, kSession, kHead };

// A committed micro-batch's part of its step's totals.
struct ContributionCounts {
  int64_t valid_token_count = 0;
  double loss_sum = 0;
  double token_weight_sum = 0;
  int64_t non_finite_row_count = 0;
  bool operator==(const ContributionCounts&) const = default;
};

// The factors of a commit; compared to distinguish a replay from a conflict.
struct CommitFactor {
  double factor = 1;                    // finite in fp32
  std::optional<Digest> token_factors;  // of the factors of each row, if there were any
  bool operator==(const CommitFactor&) const = default;
};

// kInvalidField unless the factor is finite in fp32.
absl::Status CheckFactor(double factor);

struct MicroBatchRecord {
  int64_t attempt = 0;
  // kNone: nothing is there, but a higher attempt has announced itself (`fence_attempt`).
  ContributionState state = ContributionState::kInProgress;
  std::optional<Digest> digest;                     // absent for a tombstone of one that was never seen, and while in progress
  ContributionForm form = ContributionForm::kNone;  // how it is, or was, held
  ContributionCounts counts;
  CommitFactor factor;
  int64_t tombstone_attempt = -1;                 // highest attempt that was discarded; -1: none
  DiscardedBy discarded_by = DiscardedBy::kCall;  // at that attempt
  int64_t fence_attempt = 0;                      // highest attempt that announced itself: lower ones are refused
  // Whether there is a contribution, decided or not, and not only a fence or a tombstone.
  bool IsPresent() const { return state != ContributionState::kNone && state != ContributionState::kDiscarded; }
  bool operator==(const MicroBatchRecord&) const = default;
};

struct StepTotals {
  int64_t micro_batch_count = 0;
  int64_t valid_token_count = 0;
  double loss_sum = 0;
  double token_weight_sum = 0;
  int64_t non_finite_row_count = 0;
  bool operator==(const StepTotals&) const = default;
};

struct StepRecord {
  int64_t step = 0;
  StepState state = StepState::kOpen;
  std::map<int64_t, MicroBatchRecord> micro_batches;
  const MicroBatchRecord* Find(int64_t micro_batch) const;  // null if nothing is known of it
  StepTotals Totals() const;                                // in ascending id, so the sums do not depend on order of arrival
  bool HasUndecided() const;                                // in progress or staged
};

// Exactly 0 ... n-1, or exactly these ids (distinct, >= 0).
using ExpectedMicroBatches = std::variant<int64_t, std::vector<int64_t>>;

enum class BeginDecision {
  kCompute,         // new: Begin() it, and call one of Finish...() or Abort()
  kReplay,          // known with this digest: compute and answer, add nothing
  kPayloadDiffers,  // known with another digest, and FIRST_WINS: compute and answer, add nothing
};

class StepLedger {
 public:
  // At most `max_micro_batches` records in one step, tombstones included.
  StepLedger(int64_t initial_step, int64_t max_micro_batches) : max_micro_batches_(max_micro_batches) { Reset(initial_step); }

  const StepRecord& open() const { return open_; }
  const std::optional<StepRecord>& last_closed() const { return last_closed_; }
  // The last closed step if it is `step`, else null.
  const StepRecord* FindClosed(int64_t step) const {
    return last_closed_.has_value() && last_closed_->step == step ? &*last_closed_ : nullptr;
  }

  // The checkpoints that a trainer at another step may restore: "step-20=20,step-10=10", for messages.
  void SetCheckpoints(std::string checkpoints) { checkpoints_ = std::move(checkpoints); }
  const std::string& checkpoints() const { return checkpoints_; }

  // kStepMismatch, with both steps and the checkpoints, unless `step` is the open (or sealed) one.
  absl::Status CheckStep(int64_t step) const;
  // As CheckStep(), and kMicroBatchInProgress.
  absl::Status CheckNotInProgress(int64_t step, int64_t micro_batch) const;
  // Whether Begin() would be refused whatever the digest is. For refusing before the upload.
  // kStepMismatch, kStepSealed, kMicroBatchDiscarded, kAttemptSuperseded, kMicroBatchInProgress (by this attempt: a higher one is
  // let through, and finds it decided when its turn comes), kLimitExceeded.
  absl::Status CheckBegin(int64_t step, int64_t micro_batch, int64_t attempt) const;
  // Announces an attempt that CheckBegin() admits, when its header has come. Lower attempts are refused from now on, and an
  // undecided one of theirs is forgotten. True if there was one: the caller drops it. A committed one stays. An attempt 0 leaves
  // nothing behind. Not while the micro-batch is in progress (kInternal).
  absl::StatusOr<bool> Supersede(int64_t step, int64_t micro_batch, int64_t attempt);
  // Decides about a begin of this attempt; changes nothing. Errors: those of CheckBegin() above (in progress whatever the attempt),
  // and kMicroBatchConflict. A known micro-batch may be replayed while the step is sealed. One of a closed step is refused with
  // kStepMismatch like any other; GetStep reports its state. A higher attempt of a staged micro-batch is new: it supersedes the
  // staged contribution, which the caller drops. Without `digest`, which is not known yet: kReplay if this attempt or a lower one
  // is known, because only the digest can decide then.
  absl::StatusOr<BeginDecision> CheckBegin(int64_t step, int64_t micro_batch, int64_t attempt, const std::optional<Digest>& digest,
                                           bool first_wins) const;
  // Begins a micro-batch that CheckBegin() has found new in this turn. Without `digest` SetDigest() must come before Finish...().
  void Begin(int64_t micro_batch, int64_t attempt, const std::optional<Digest>& digest);
  // Sets the digest of a micro-batch that has begun provisionally; once (kInternal otherwise).
  absl::Status SetDigest(int64_t micro_batch, const Digest& digest);
  // `form`: how it was held until now; kDirect if not at all.
  absl::Status FinishCommitted(int64_t micro_batch, ContributionForm form, const ContributionCounts& counts) {
    return Finish(micro_batch, ContributionState::kCommitted, form, counts);
  }
  // `form`: kStaged or kHeld.
  absl::Status FinishStaged(int64_t micro_batch, ContributionForm form, const ContributionCounts& counts) {
    return Finish(micro_batch, ContributionState::kStaged, form, counts);
  }
  // The micro-batch failed before it added anything: it is forgotten, except the fence and the tombstone that it may have had.
  absl::Status Abort(int64_t micro_batch);

  // kMicroBatchDiscarded, kAttemptSuperseded, kMicroBatchInProgress and kMicroBatchNotFound, the first that applies; kStepMismatch,
  // kInvalidField. True if the commit is to be carried out now, false if an equal one was before, for this attempt or
  // a lower one. The caller adds the contribution and then calls FinishCommit(); nothing can come in between, because it is
  // admitted to the head.
  absl::StatusOr<bool> CheckCommit(int64_t step, int64_t micro_batch, int64_t attempt, const CommitFactor& factor) const;
  absl::Status FinishCommit(int64_t micro_batch, const CommitFactor& factor);

  // True if an uncommitted contribution was dropped. Leaves a tombstone, except for an unknown one in a sealed step, which takes
  // nothing new anyway. kMicroBatchConflict for a committed one.
  absl::Status CheckDiscard(int64_t step, int64_t micro_batch, int64_t attempt) const;
  absl::StatusOr<bool> Discard(int64_t step, int64_t micro_batch, int64_t attempt, DiscardedBy by = DiscardedBy::kCall);

  // Errors: kMicroBatchMissing (a discarded one is missing too), kMicroBatchUncommitted (any undecided one, expected or not),
  // kMicroBatchUnexpected, in this order, with at most 16 ids in message and metadata; kInvalidField for an expectation with
  // negative or repeated ids.
  // True if the step was sealed by this call, false if it had been before (with an expectation that still holds).
  absl::StatusOr<bool> Seal(int64_t step, const ExpectedMicroBatches& expected);
  // Whether Seal() would be refused.
  absl::Status CheckSeal(int64_t step, const ExpectedMicroBatches& expected) const;
  // Closes the step and opens the next one. Sealed steps for kApplied and kReplaced; open ones too for kDiscarded: its staged
  // micro-batches are recorded as discarded then. kMicroBatchInProgress while one is being computed.
  absl::Status Close(int64_t step, StepState how);
  // Whether Close() would be refused.
  absl::Status CheckClose(int64_t step, StepState how) const;

  // Starts again at `step` with nothing known: restore, uploaded weights, a new run.
  void Reset(int64_t step);

 private:
  // The record of an IN_PROGRESS micro-batch; kInternal otherwise.
  absl::StatusOr<MicroBatchRecord*> InProgress(int64_t micro_batch);
  absl::Status Finish(int64_t micro_batch, ContributionState state, ContributionForm form, const ContributionCounts& counts);
  absl::Status CheckExpectation(const ExpectedMicroBatches& expected) const;

  const int64_t max_micro_batches_;
  std::map<int64_t, std::optional<Digest>> pending_digests_;  // of the micro-batches in progress; absent: not known yet
  StepRecord open_;
  std::optional<StepRecord> last_closed_;
  std::string checkpoints_;
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_STEP_LEDGER_H_
