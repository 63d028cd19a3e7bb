// SubmissionRun: the computation of one submission, and what it adds to its heads.
#ifndef HEADWATER_SERVER_HEADS_STEPS_SUBMISSION_RUN_H_
#define HEADWATER_SERVER_HEADS_STEPS_SUBMISSION_RUN_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/heads/head.h"
#include "server/heads/steps/submit.h"

namespace headwater::heads {

// Whether it may take a staging slot.
bool NeedsSlot(const Submission& submission);
// The heads whose accumulators a submission adds to, each once, in the order of the terms.
std::vector<Head*> TargetsOf(const Submission& submission);

// Lives while the submission is admitted to all its heads, perhaps beside other runs.
class SubmissionRun : private RowFlow {
 public:
  SubmissionRun(const Submission& submission, LossEngine& engine, const std::function<bool()>& cancelled)
      : submission_(submission),
        engine_(engine),
        cancelled_(cancelled),
        sequencer_(submission.terms.front().head->sequencer),
        targets_(TargetsOf(submission)),
        decided_(submission.incoming == nullptr) {}

  absl::StatusOr<SubmissionOutcome> Run();

 private:
  void BuildTerms();
  // Begins in all targets, or in none; in one turn, because a run beside this one may be about the same micro-batch.
  absl::Status Begin();
  absl::Status ChooseForm();
  // Null if every target has a free slot.
  Head* FirstWithoutSlot() const;
  // How many undecided contributions of this target, held as rows or in slots, are the caller's own session's, or not.
  int64_t PendingOf(Head& target, bool own, bool is_held) const;
  // kStagingFull; says to try again if another session may free a slot of `target`. The caller's own is never waited for: it waits
  // for this answer.
  absl::Status SlotsTaken(Head& target) const;
  absl::StatusOr<MicroBatchResult> Compute();
  // RowFlow: the engine's questions while rows come. Decide() is the last moment at which the run can end without a trace.
  absl::Status AwaitRows(int64_t row_end) override;
  absl::Status Decide(const DigestBuilder* rows) override;
  void GradHiddenReady(int64_t row_end) override { submission_.incoming->GradHiddenReady(row_end); }
  // Commits, or puts aside, what was computed.
  absl::Status Settle(MicroBatchResult& result);
  absl::StatusOr<HeldRows> KeepRows();
  // EAGER, in deterministic mode: commits it, to be added when its turn comes.
  absl::Status TakeItsPlace();
  bool in_order() const { return !targets_.empty() && targets_.front()->in_order(); }
  // Not OK once the submission should give up: it was cancelled, a higher attempt waits, or another run has lost a head.
  absl::Status CheckWanted() const;
  // kStepLost if one of the targets has been lost since Begin(). In a turn.
  absl::Status CheckNotLost() const;
  // Gives up; returns `status`.
  absl::Status Abort(const absl::Status& status);
  // After an engine call that adds to the accumulators.
  absl::Status Failed(const absl::Status& status);
  // Both fail, with nothing pending, if a head was lost meanwhile.
  absl::Status FinishPending(PendingContribution::Content content);
  absl::Status FinishCommitted();
  ContributionCounts CountsOf(const Head* head) const;
  int64_t id() const { return *submission_.micro_batch; }

  const Submission& submission_;
  LossEngine& engine_;
  const std::function<bool()>& cancelled_;
  scheduler::Sequencer& sequencer_;
  const std::vector<Head*> targets_;
  std::vector<LossTerm> terms_;
  bool adds_ = false;
  bool decided_;  // all rows are there, or Decide() was OK: the engine may add from now on
  ContributionForm form_ = ContributionForm::kNone;
  SubmissionOutcome outcome_;
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_SUBMISSION_RUN_H_
