// The computation of one submission, and what it adds to its heads.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/each_name.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/head.h"
#include "server/heads/steps/pending_contribution.h"

namespace headwater::heads {
namespace {

// How soon a slot that another session has may be free again.
constexpr char kSlotRetryAfterMs[] = "100";

// The error without its advice to try again: the caller's own session has what is missing.
absl::Status WithoutRetry(const absl::Status& status) {
  ErrorMetadata metadata = GetErrorMetadata(status);
  metadata.erase("retryAfterMs");
  return MakeError(GetErrorReason(status), std::string(status.message()), std::move(metadata));
}

absl::Status Cancelled() {
  return MakeError(ErrorReason::kCancelled, "the call was cancelled before its micro-batch was decided; nothing was added");
}

// The term for a later computation: the caller's memory may be gone by then, and has its values already.
LossTerm WithoutOutputs(LossTerm term) {
#define HEADWATER_CLEAR_OUTPUT(name) term.name = nullptr;
  HEADWATER_EACH(HEADWATER_CLEAR_OUTPUT, HEADWATER_TOKEN_OUTPUTS)
#undef HEADWATER_CLEAR_OUTPUT
  return term;
}

bool Contains(const std::vector<Head*>& heads, const Head* head) {
  return std::find(heads.begin(), heads.end(), head) != heads.end();
}

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
  bool in_order() const { return !targets_.empty() && targets_.front()->steps.in_order(); }
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

}  // namespace

bool NeedsSlot(const Submission& submission) {
  return (submission.explicit_commit || submission.refuse_non_finite) && !submission.late_token_factors;
}

std::vector<Head*> TargetsOf(const Submission& submission) {
  std::vector<Head*> targets;
  if (!submission.backward) return targets;
  for (const SubmittedTerm& term : submission.terms) {
    if (!term.head->spec().trainable) continue;
    Head* const head = term.head.get();
    if (std::find(targets.begin(), targets.end(), head) == targets.end()) targets.push_back(head);
  }
  return targets;
}

std::vector<Head*> HeadsOf(const Submission& submission) {
  std::vector<Head*> heads;
  const auto add = [&heads](const std::shared_ptr<Head>& head) {
    if (head != nullptr && std::find(heads.begin(), heads.end(), head.get()) == heads.end()) heads.push_back(head.get());
  };
  for (const SubmittedTerm& term : submission.terms) {
    add(term.head);
    add(term.teacher_head);
  }
  return heads;
}

absl::StatusOr<SubmissionOutcome> SubmissionRun::Run() {
  {
    const Turn turn(sequencer_);
    // Checked again: the heads may have changed while this call waited. From here on only other runs change them.
    HEADWATER_RETURN_IF_ERROR(CheckSubmission(submission_));
    BuildTerms();
    HEADWATER_RETURN_IF_ERROR(Begin());
  }
  if (outcome_.needs_all_rows) return std::move(outcome_);
  if (absl::Status status = CheckWanted(); !status.ok()) return Abort(status);
  if (adds_) {
    if (absl::Status status = ChooseForm(); !status.ok()) return Abort(status);
  }
  absl::StatusOr<MicroBatchResult> result = Compute();
  if (HasReason(result.status(), ErrorReason::kStagingFull) && form_ == ContributionForm::kStaged) {
    // A run beside this one has taken the slot that was free (EngineHead::StagesConcurrently): nothing has happened yet.
    if (submission_.hold == nullptr) {
      Head* const full = FirstWithoutSlot();
      result = SlotsTaken(full == nullptr ? *targets_.front() : *full);
    } else {
      form_ = ContributionForm::kHeld;
      result = Compute();
    }
  }
  bool may_have_added = form_ == ContributionForm::kDirect && decided_;
  if (result.ok() && !decided_) {
    result = MakeError(ErrorReason::kInternal, "the engine computed without asking for the decision");
    may_have_added = form_ == ContributionForm::kDirect;
  }
  if (!result.ok()) {
    if (may_have_added) return Failed(result.status());
    const absl::Status status = Abort(result.status());
    if (decided_ || !submission_.incoming->stalled()) return status;
    outcome_.needs_all_rows = true;
    return std::move(outcome_);
  }
  outcome_.terms = std::move(result->terms);
  if (adds_) {
    HEADWATER_RETURN_IF_ERROR(Settle(*result));
    outcome_.state = submission_.explicit_commit ? ContributionState::kStaged : ContributionState::kCommitted;
    outcome_.form = form_;
  }
  return std::move(outcome_);
}

void SubmissionRun::BuildTerms() {
  terms_.reserve(submission_.terms.size());
  for (const SubmittedTerm& submitted : submission_.terms) {
    LossTerm& term = terms_.emplace_back(submitted.term);
    const Head* const teacher = submitted.teacher_head.get();
    term.head = submitted.head->on_engine.get();
    term.teacher_head = teacher != nullptr ? teacher->on_engine.get() : nullptr;
    outcome_.weight_versions.push_back(submitted.head->weights.version());
    outcome_.teacher_weight_versions.push_back(teacher != nullptr ? teacher->weights.version() : 0);
  }
}

absl::Status SubmissionRun::CheckWanted() const {
  if (cancelled_ != nullptr && cancelled_()) return Cancelled();
  if (!adds_) return absl::OkStatus();  // a repeat of what is decided is answered whatever attempt waits
  const Turn turn(sequencer_);
  for (Head* target : targets_) {
    if (target->state == HeadState::kLost) return target->LostError();
    const std::optional<int64_t> waiting = target->steps.waiting_attempts().Higher(id(), submission_.attempt);
    if (!waiting.has_value()) continue;
    return MakeError(ErrorReason::kAttemptSuperseded,
                     absl::StrCat("attempt ", *waiting, " of micro-batch ", id(), " has come while attempt ", submission_.attempt,
                                  " was computed"),
                     {{"microBatch", absl::StrCat(id())},
                      {"attempt", absl::StrCat(submission_.attempt)},
                      {"knownAttempt", absl::StrCat(*waiting)}});
  }
  return absl::OkStatus();
}

absl::Status SubmissionRun::CheckNotLost() const {
  for (const Head* target : targets_) {
    if (target->state == HeadState::kLost) return target->LostError();
  }
  return absl::OkStatus();
}

absl::Status SubmissionRun::Begin() {
  const bool flows = submission_.incoming != nullptr;
  const std::optional<Digest> digest = flows ? std::nullopt : std::optional(submission_.digest);
  if (!flows) outcome_.digest = submission_.digest;
  std::string known_by, new_to;
  for (Head* target : targets_) {
    const int64_t step = target->steps.open().step;
    if (!outcome_.step.has_value()) outcome_.step = step;
    HEADWATER_ASSIGN_OR_RETURN(const BeginDecision decision,
                               target->steps.ledger().CheckBegin(step, id(), submission_.attempt, digest, submission_.first_wins));
    if (decision == BeginDecision::kCompute) {
      new_to = target->name().ToString();
      continue;
    }
    if (known_by.empty() && !flows) {
      const MicroBatchRecord& record = *target->steps.open().Find(id());
      outcome_.state = record.state;
      outcome_.form = record.form;
    }
    known_by = target->name().ToString();
    if (decision == BeginDecision::kPayloadDiffers) outcome_.payload_differs = true;
  }
  // One head knows it: its rows have to be there first.
  outcome_.needs_all_rows = flows && !known_by.empty();
  if (outcome_.needs_all_rows) return absl::OkStatus();
  if (!known_by.empty() && !new_to.empty()) {
    return MakeError(ErrorReason::kMicroBatchConflict,
                     absl::StrCat("micro-batch ", id(), " is known to ", known_by, " and not to ", new_to,
                                  "; the heads of a micro-batch take it all or not at all"),
                     {{"microBatch", absl::StrCat(id())}, {"knownBy", known_by}, {"notKnownBy", new_to}});
  }
  outcome_.replayed = !known_by.empty() && !outcome_.payload_differs;
  adds_ = !new_to.empty();
  if (!adds_) return absl::OkStatus();
  for (Head* target : targets_) {
    target->steps.ledger().Begin(id(), submission_.attempt, digest);
    target->steps.DropLowerAttempt(id());
  }
  return absl::OkStatus();
}

absl::Status SubmissionRun::ChooseForm() {
  form_ = submission_.late_token_factors || in_order() ? ContributionForm::kHeld : ContributionForm::kDirect;
  if (in_order() && submission_.hold == nullptr) {
    return MakeError(ErrorReason::kStagingFull, "in deterministic mode every contribution is held, and the call does not allow it",
                     {{"head", targets_.front()->name().ToString()}});
  }
  if (in_order() || !NeedsSlot(submission_)) return absl::OkStatus();
  form_ = ContributionForm::kStaged;
  Head* const full = FirstWithoutSlot();
  if (full == nullptr) return absl::OkStatus();
  if (submission_.hold == nullptr) return SlotsTaken(*full);
  form_ = ContributionForm::kHeld;
  return absl::OkStatus();
}

Head* SubmissionRun::FirstWithoutSlot() const {
  for (Head* target : targets_) {
    if (target->on_engine->FreeStagingSlots() <= 0) return target;
  }
  return nullptr;
}

int64_t SubmissionRun::PendingOf(Head& target, bool own, bool is_held) const {
  const Turn turn(sequencer_);
  return std::count_if(target.steps.pending().begin(), target.steps.pending().end(), [&](const auto& entry) {
    const PendingContribution& pending = *entry.second;
    const bool is_own = submission_.session.has_value() && pending.session() == submission_.session;
    return is_own == own && pending.is_held() == is_held && !pending.dropped();
  });
}

absl::Status SubmissionRun::SlotsTaken(Head& target) const {
  const int64_t slots = target.spec().staging_slots;
  const int64_t own = PendingOf(target, /*own=*/true, /*is_held=*/false);
  ErrorMetadata metadata = {
      {"head", target.name().ToString()}, {"stagingSlots", absl::StrCat(slots)}, {"ownSlots", absl::StrCat(own)}};
  // Heads by rows have as many slots on each rank.
  if (own < slots || PendingOf(target, /*own=*/false, /*is_held=*/false) > 0) metadata.emplace("retryAfterMs", kSlotRetryAfterMs);
  return MakeError(ErrorReason::kStagingFull,
                   absl::StrCat("all ", slots, " staging slots of ", target.name().ToString(), " are taken, ", own,
                                " of them by the caller's own session; commit or discard one of its micro-batches, allow this one "
                                "to be held (allow_held), or create the head with more staging_slots"),
                   std::move(metadata));
}

absl::StatusOr<MicroBatchResult> SubmissionRun::Compute() {
  MicroBatch micro_batch;
  micro_batch.hidden = submission_.hidden;
  micro_batch.terms = terms_;
  micro_batch.backward = submission_.backward;
  micro_batch.grad_hidden = submission_.grad_hidden;
  micro_batch.grad_hidden_scale = submission_.grad_hidden_scale;
  micro_batch.refuse_non_finite = submission_.refuse_non_finite;  // never together with kAccumulate, see NeedsSlot()
  if (form_ == ContributionForm::kDirect) micro_batch.grad_weight = GradWeightMode::kAccumulate;
  if (form_ == ContributionForm::kStaged) micro_batch.grad_weight = GradWeightMode::kStage;
  micro_batch.flow = submission_.incoming != nullptr ? this : nullptr;
  micro_batch.digest_rows = submission_.incoming != nullptr && submission_.engine_digests && submission_.backward;
  micro_batch.after = submission_.after;
  micro_batch.label = submission_.label.empty() ? nullptr : submission_.label.c_str();
  return engine_.Compute(micro_batch);
}

absl::Status SubmissionRun::AwaitRows(int64_t row_end) {
  HEADWATER_RETURN_IF_ERROR(CheckWanted());
  return submission_.incoming->AwaitRows(row_end);
}

absl::Status SubmissionRun::Decide(const DigestBuilder* rows) {
  if (submission_.backward) {
    HEADWATER_ASSIGN_OR_RETURN(outcome_.digest, submission_.incoming->Finish(rows));
  }
  HEADWATER_RETURN_IF_ERROR(CheckWanted());
  if (adds_) {
    const Turn turn(sequencer_);
    HEADWATER_RETURN_IF_ERROR(CheckNotLost());
    for (Head* target : targets_) HEADWATER_RETURN_IF_ERROR(target->steps.ledger().SetDigest(id(), outcome_.digest));
  }
  decided_ = true;
  return absl::OkStatus();
}

absl::Status SubmissionRun::Settle(MicroBatchResult& result) {
  if (form_ == ContributionForm::kDirect) return FinishCommitted();
  if (form_ == ContributionForm::kStaged && result.staged == nullptr) {
    return Abort(
        MakeError(ErrorReason::kInternal, "the engine returned no staged contribution", {{"microBatch", absl::StrCat(id())}}));
  }
  if (absl::Status status = CheckWanted(); !status.ok()) return Abort(status);
  if (form_ == ContributionForm::kHeld && submission_.explicit_commit) {
    absl::StatusOr<HeldRows> held = KeepRows();
    return held.ok() ? FinishPending(*std::move(held)) : Abort(held.status());
  }
  if (in_order()) return TakeItsPlace();
  if (submission_.explicit_commit) return FinishPending(std::move(result.staged));
  // EAGER, but refused until now if anything was not finite.
  absl::Status added;
  if (form_ == ContributionForm::kStaged) {
    added = result.staged->Commit(1.0);
  } else {
    HeldRows again{submission_.hidden, {}, nullptr, {}};
    for (const LossTerm& term : terms_) again.terms.push_back(WithoutOutputs(term));
    added = AddHeld(std::move(again), CommitArguments(), engine_, submission_.after);
  }
  return added.ok() ? FinishCommitted() : Failed(added);
}

absl::StatusOr<HeldRows> SubmissionRun::KeepRows() {
  bool is_first = false;
  {
    const Turn turn(sequencer_);
    is_first = in_order() && std::any_of(targets_.begin(), targets_.end(),
                                         [this](Head* target) { return target->steps.window()->IsFront(id()); });
  }
  const auto& hold = is_first && submission_.hold_first != nullptr ? submission_.hold_first : submission_.hold;
  absl::StatusOr<std::shared_ptr<const void>> storage = hold();
  if (!storage.ok()) {
    const auto holds_own = [this](Head* target) { return PendingOf(*target, /*own=*/true, /*is_held=*/true) > 0; };
    return !in_order() && std::any_of(targets_.begin(), targets_.end(), holds_own) ? WithoutRetry(storage.status())
                                                                                   : storage.status();
  }
  HeldRows held;
  held.hidden = submission_.hidden;
  held.storage = *std::move(storage);
  std::set<const Head*> teachers;
  for (size_t index = 0; index < terms_.size(); ++index) {
    const SubmittedTerm& submitted = submission_.terms[index];
    if (!submitted.head->spec().trainable) continue;  // adds nothing
    LossTerm& term = held.terms.emplace_back(WithoutOutputs(terms_[index]));
    term.teacher_hidden = submitted.term.teacher_hidden;  // hold() may have moved the rows
    if (submitted.teacher_head == nullptr || !teachers.insert(submitted.teacher_head.get()).second) continue;
    held.teachers.push_back({submitted.teacher_head, term.teacher_head, submitted.teacher_head->weights.version()});
  }
  return held;
}

absl::Status SubmissionRun::TakeItsPlace() {
  absl::StatusOr<HeldRows> held = KeepRows();
  if (!held.ok()) return Abort(held.status());
  const Turn turn(sequencer_);
  for (Head* target : targets_) {
    target->steps.Wait(id(), *held, CommitArguments(), *target->on_engine);
    // Cannot fail: it is in progress since Begin(), and in this mode no other call computes, and loses the head, meanwhile.
    target->steps.ledger().FinishCommitted(id(), form_, CountsOf(target)).IgnoreError();
    target->MicroBatchChanged();
  }
  return absl::OkStatus();
}

absl::Status SubmissionRun::Abort(const absl::Status& status) {
  if (!adds_) return status;
  const Turn turn(sequencer_);
  for (Head* target : targets_) {
    // If the head was lost since Begin() it is forgotten already.
    if (target->state != HeadState::kLost) target->steps.ledger().Abort(id()).IgnoreError();
    target->MicroBatchChanged();
  }
  return status;
}

absl::Status SubmissionRun::Failed(const absl::Status& status) {
  if (!IsEngineFailure(status)) return Abort(status);
  for (Head* target : targets_) target->MarkLost(status);
  return status;
}

absl::Status SubmissionRun::FinishPending(PendingContribution::Content content) {
  const auto pending =
      std::make_shared<PendingContribution>(std::set<const Head*>(targets_.begin(), targets_.end()), submission_.attempt,
                                            submission_.session, std::move(content), submission_.until_decided);
  const Turn turn(sequencer_);
  if (absl::Status status = CheckNotLost(); !status.ok()) return Abort(status);
  std::vector<std::shared_ptr<scheduler::WaitList>> lists;
  for (const Head* target : targets_) lists.push_back(target->micro_batch_changed);
  pending->WakeAtDrop(std::move(lists));
  for (Head* target : targets_) {
    target->steps.FinishPending(id(), pending, form_, CountsOf(target));  // it has been in progress since Begin()
  }
  return absl::OkStatus();
}

absl::Status SubmissionRun::FinishCommitted() {
  const Turn turn(sequencer_);
  const absl::Status status = CheckNotLost();
  for (Head* target : targets_) {
    // Also in the heads that are left when one is lost: it is in their accumulators. Cannot fail in those.
    target->steps.ledger().FinishCommitted(id(), form_, CountsOf(target)).IgnoreError();
    target->MicroBatchChanged();
  }
  return status;
}

ContributionCounts SubmissionRun::CountsOf(const Head* head) const {
  ContributionCounts counts;
  size_t index = 0;
  for (const LossSums& sums : outcome_.terms) {
    if (submission_.terms[index++].head.get() != head) continue;
    counts.valid_token_count += sums.valid_token_count;
    counts.loss_sum += sums.loss_sum;
    counts.token_weight_sum += sums.token_weight_sum;
    counts.non_finite_row_count += sums.non_finite_row_count;
  }
  return counts;
}

absl::StatusOr<SubmissionOutcome> Submit(const Submission& submission, LossEngine& engine, const std::function<bool()>& cancelled) {
  // A submission that can be refused is refused without waiting: a duplicate of the micro-batch that is being computed, above all.
  HEADWATER_RETURN_IF_ERROR(CheckSubmission(submission));
  const std::vector<Head*> heads = HeadsOf(submission), targets = TargetsOf(submission);
  // A contribution that could not be added when its turn came holds its rows' memory.
  HEADWATER_RETURN_IF_ERROR(AddInOrder(targets));
  scheduler::Sequencer& sequencer = heads.front()->sequencer;
  const auto count_calls = [&](int64_t change) {
    const Turn turn(sequencer);
    for (Head* head : heads) head->running_calls += change;
  };
  count_calls(1);
  const absl::Cleanup is_over = [&count_calls] { count_calls(-1); };
  const bool may_stage = NeedsSlot(submission) && std::any_of(targets.begin(), targets.end(), [](const Head* head) {
                           return !head->on_engine->StagesConcurrently();
                         });
  const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
    scheduler::Needs needed;
    for (const Head* head : heads) {
      if (head->retired) return head->DeletedError();
      const bool adds = !may_stage && !head->deterministic && Contains(targets, head);
      head->AddNeed(adds ? kSharesGradient : Contains(targets, head) ? kChangesGradient : head->reads(), needed);
    }
    return needed;
  };
  absl::StatusOr<SubmissionOutcome> outcome;
  {
    HEADWATER_ASSIGN_OR_RETURN(const auto admission, sequencer.Acquire(needs, scheduler::AsLongAsItTakes(), kWaitsForHead));
    outcome = SubmissionRun(submission, engine, cancelled).Run();
  }
  if (outcome.ok() && outcome->state == ContributionState::kCommitted && !outcome->replayed) {
    if (absl::Status status = AddInOrder(targets); !status.ok()) outcome = status;
  }
  return outcome;
}

}  // namespace headwater::heads
