// Head's way from a micro-batch, complete or still coming, to a settled contribution.
#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/compute_locks.h"
#include "server/heads/head.h"

namespace headwater::heads {
namespace {

std::string TermField(size_t index, const char* field) { return absl::StrCat("terms[", index, "].", field); }

absl::Status MissingField(const std::string& field, const char* why) {
  return MakeError(ErrorReason::kMissingField, absl::StrCat(field, " is required ", why), {{"field", field}});
}

absl::Status InvalidCombination(const std::string& field, const char* why) {
  return MakeError(ErrorReason::kInvalidCombination, absl::StrCat(field, " must be absent ", why), {{"field", field}});
}

absl::Status CheckVersion(const std::optional<int64_t>& expected, int64_t actual, const std::string& head,
                          const std::string& field) {
  if (!expected.has_value() || *expected == actual) return absl::OkStatus();
  return MakeError(
      ErrorReason::kWeightVersionMismatch,
      absl::StrCat("the call expects version ", *expected, " of the weights of ", head, ", they are of version ", actual),
      {{"field", field}, {"expected", absl::StrCat(*expected)}, {"actual", absl::StrCat(actual)}});
}

bool NeedsSlot(const Submission& submission) {
  return (submission.explicit_commit || submission.refuse_non_finite) && !submission.late_token_factors;
}

// How soon a slot that another session has may be free again.
constexpr char kSlotRetryAfterMs[] = "100";

// The same error, which does not say to try again: the caller's own session has what is missing.
absl::Status WithoutRetry(const absl::Status& status) {
  ErrorMetadata metadata = GetErrorMetadata(status);
  metadata.erase("retryAfterMs");
  return MakeError(GetErrorReason(status), std::string(status.message()), std::move(metadata));
}

absl::Status Cancelled() {
  return MakeError(ErrorReason::kCancelled, "the call was cancelled before its micro-batch was decided; nothing was added");
}

// To be computed again: the caller's memory may be gone by then, and has its values already.
LossTerm WithoutOutputs(LossTerm term) {
  term.token_loss = term.lse = term.target_log_probability = term.entropy = nullptr;
  term.mean_logits = term.log_sum_sq_probs = nullptr;
  term.argmax = nullptr;
  return term;
}

std::set<Head*, std::less<>> HeadsOf(const Submission& submission) {
  std::set<Head*, std::less<>> heads;
  for (const SubmittedTerm& term : submission.terms) {
    heads.insert(term.head.get());
    if (term.teacher_head != nullptr) heads.insert(term.teacher_head.get());
  }
  return heads;
}

}  // namespace

// ---- what can be refused at once -------------------------------------------------------------------------------------

std::vector<Head*> Head::TargetsOf(const Submission& submission) {
  std::vector<Head*> targets;
  if (!submission.backward) return targets;
  for (const SubmittedTerm& term : submission.terms) {
    if (term.head == nullptr || !term.head->spec_.trainable) continue;
    if (std::find(targets.begin(), targets.end(), term.head.get()) == targets.end()) targets.push_back(term.head.get());
  }
  return targets;
}

absl::Status Head::CheckTerm(const Submission& submission, size_t index) {
  const SubmittedTerm& term = submission.terms[index];
  if (term.head == nullptr) return MissingField(TermField(index, "head"), "in every term");
  const bool is_target = submission.backward && term.head->spec_.trainable;
  const bool is_jsd = std::holds_alternative<JsdSpec>(term.term.loss);
  if (is_jsd && term.teacher_head == nullptr) return MissingField(TermField(index, "teacher"), "for JSD");
  if (!is_jsd && term.teacher_head != nullptr)
    return InvalidCombination(TermField(index, "teacher"), "for cross entropy and top-k teachers");
  if (is_target && !term.head_epoch.has_value()) {
    return MissingField(TermField(index, "head.head_epoch"), "for a backward call against a trainable head");
  }
  if (is_target && !term.step.has_value()) {
    return MissingField(TermField(index, "head.step"), "for a backward call against a trainable head");
  }
  if (!is_target && term.step.has_value() && !submission.backward) {
    return InvalidCombination(TermField(index, "head.step"), "in a forward-only call");
  }
  for (size_t other = 0; is_target && other < index; ++other) {
    const SubmittedTerm& before = submission.terms[other];
    if (before.head != term.head || (before.step == term.step && before.head_epoch == term.head_epoch)) continue;
    const std::string field = TermField(index, before.step == term.step ? "head.head_epoch" : "head.step");
    return MakeError(ErrorReason::kInvalidCombination,
                     absl::StrCat(field, " must be that of terms[", other, "], which is about the same head"), {{"field", field}});
  }
  if (absl::Status status = term.head->CheckAsStudent(term, is_target, submission); !status.ok()) return status;
  return is_jsd ? term.teacher_head->CheckAsTeacher(term) : absl::OkStatus();
}

absl::Status Head::CheckAsStudent(const SubmittedTerm& term, bool is_target, const Submission& submission) const {
  absl::MutexLock state_lock(&state_mutex_);
  const bool names_step = is_target || term.step.has_value();
  if (absl::Status status = Check(term.head_epoch.has_value() ? &*term.head_epoch : nullptr, Need::kReady, names_step);
      !status.ok()) {
    return status;
  }
  absl::Status version =
      CheckVersion(term.expected_weight_version, weights_.version(), name_.ToString(), "head.expected_weight_version");
  if (!version.ok()) return version;
  if (!is_target) return absl::OkStatus();
  const int64_t micro_batch = *submission.micro_batch;
  absl::Status begin = steps_.CheckBegin(*term.step, micro_batch, submission.attempt);
  if (!begin.ok()) return begin;
  const bool needs_slot = NeedsSlot(submission) && submission.hold == nullptr;
  if (spec_.staging_slots == 0 && needs_slot && !steps_.open().micro_batches.contains(micro_batch)) {
    return MakeError(ErrorReason::kStagingFull,
                     absl::StrCat(name_.ToString(), " was created without staging slots, which EXPLICIT commits and REFUSE need"),
                     {{"head", name_.ToString()}, {"stagingSlots", "0"}});
  }
  return absl::OkStatus();
}

absl::Status Head::CheckAsTeacher(const SubmittedTerm& term) const {
  absl::MutexLock state_lock(&state_mutex_);
  const Epoch* epoch = term.teacher_head_epoch.has_value() ? &*term.teacher_head_epoch : nullptr;
  if (absl::Status status = Check(epoch, Need::kReady, false); !status.ok()) return status;
  return CheckVersion(term.expected_teacher_weight_version, weights_.version(), name_.ToString(),
                      "teacher.expected_weight_version");
}

absl::Status Head::CheckSubmission(const Submission& submission) {
  if (submission.terms.empty()) return MissingField("terms", "at least once");
  const bool has_target = !TargetsOf(submission).empty();
  if (has_target && !submission.micro_batch.has_value()) {
    return MissingField("micro_batch", "for a backward call against a trainable head");
  }
  if (!submission.backward && submission.micro_batch.has_value())
    return InvalidCombination("micro_batch", "in a forward-only call");
  if (!submission.backward && submission.grad_hidden.data != nullptr) {
    return InvalidCombination("return_grad_hidden", "in a forward-only call");
  }
  for (size_t index = 0; index < submission.terms.size(); ++index) {
    if (absl::Status status = CheckTerm(submission, index); !status.ok()) return status;
  }
  if (submission.late_token_factors && (!submission.explicit_commit || submission.hold == nullptr)) {
    return InvalidCombination("late_token_factors", "unless the commit is explicit and the rows may be held");
  }
  if (!has_target && submission.micro_batch.has_value()) {
    const std::string head = submission.terms[0].head->name_.ToString();
    return MakeError(ErrorReason::kHeadNotTrainable, absl::StrCat(head, " is frozen: it takes no micro_batch"),
                     {{"head", head}, {"field", "micro_batch"}});
  }
  return absl::OkStatus();
}

absl::Status Head::Announce(const Submission& submission, const WaitLimits& limits) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
  const std::vector<Head*> targets = TargetsOf(submission);
  if (submission.attempt == 0 || targets.empty()) return absl::OkStatus();
  const int64_t micro_batch = *submission.micro_batch;
  // Before the mark: nobody computes on a head that files have, and a call that is given up here supersedes nothing.
  const std::set<Head*, std::less<>> heads(targets.begin(), targets.end());
  const HeadGate::Entry entry(GatesOf(heads), limits);
  if (!entry.status().ok()) return entry.status();
  // A lower attempt that is being computed gives up as soon as it may.
  for (Head* target : targets) {
    absl::MutexLock state_lock(&target->state_mutex_);
    target->steps_.MarkWaiting(micro_batch, submission.attempt);
  }
  const ComputeLocks locks(heads);
  for (Head* target : targets) {
    absl::MutexLock state_lock(&target->state_mutex_);
    target->steps_.UnmarkWaiting(micro_batch, submission.attempt);
  }
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
  for (const SubmittedTerm& term : submission.terms) {
    Head& head = *term.head;
    if (!head.spec_.trainable) continue;
    absl::MutexLock state_lock(&head.state_mutex_);
    absl::Status status = head.steps_.Supersede(*term.step, micro_batch, submission.attempt);
    if (!status.ok()) return status;
    head.changed_.WakeAll();
  }
  return absl::OkStatus();
}

// ---- the computation and what it adds --------------------------------------------------------------------------------

// Lives while the compute locks of all heads of the submission are held, perhaps shared with other runs.
class Head::SubmissionRun {
 public:
  SubmissionRun(const Submission& submission, LossEngine& engine, const std::function<bool()>& cancelled)
      : submission_(submission), engine_(engine), cancelled_(cancelled), targets_(TargetsOf(submission)) {}

  absl::StatusOr<SubmissionOutcome> Run();

 private:
  class Flow;

  void BuildTerms();
  // Begins in all targets, or in none.
  absl::Status Begin();
  absl::StatusOr<BeginDecision> BeginIn(Head* target) ABSL_EXCLUSIVE_LOCKS_REQUIRED(target->state_mutex_);
  // Decides how the contribution is held.
  absl::Status ChooseForm();
  // Null if every target has a free slot.
  Head* FirstWithoutSlot() const;
  // How many undecided contributions of this target, held as rows or in slots, are the caller's own session's, or not.
  int64_t PendingOf(Head& target, bool own, bool is_held) const;
  // kStagingFull; says to try again if another session may free a slot of `target`. The caller's own is never waited for: it waits
  // for this answer.
  absl::Status SlotsTaken(Head& target) const;
  // `flow` null: all rows are there.
  absl::StatusOr<MicroBatchResult> Compute(RowFlow* flow);
  // The last moment at which a run whose rows were awaited can end without a trace.
  absl::Status Decide(const DigestBuilder* rows);
  // Commits, or puts aside, what was computed.
  absl::Status Settle(MicroBatchResult& result);
  // Lets the rows be kept.
  absl::StatusOr<HeldRows> KeepRows();
  absl::Status Hold();
  // EAGER, in deterministic mode: commits it, to be added when its turn comes.
  absl::Status TakeItsPlace();
  bool in_order() const { return !targets_.empty() && targets_.front()->in_order(); }
  // Not OK once the submission should give up: it was cancelled, a higher attempt waits, or another run has lost a head.
  absl::Status CheckWanted() const;
  // kStepLost if one of the targets has been lost since Begin(). With the state locks of all of them.
  absl::Status CheckNotLost() const;
  // Gives up; returns `status`.
  absl::Status Abort(const absl::Status& status);
  // After an engine call that adds to the accumulators.
  absl::Status Failed(const absl::Status& status);
  // Both fail, with nothing pending, if a head was lost meanwhile.
  absl::Status FinishPending(const std::shared_ptr<PendingContribution>& pending);
  absl::Status FinishCommitted();
  ContributionCounts CountsOf(const Head* head) const;
  std::set<const Head*> TargetSet() const { return {targets_.begin(), targets_.end()}; }
  int64_t id() const { return *submission_.micro_batch; }

  const Submission& submission_;
  LossEngine& engine_;
  const std::function<bool()>& cancelled_;
  const std::vector<Head*> targets_;
  std::vector<LossTerm> terms_;
  bool adds_ = false;
  ContributionForm form_ = ContributionForm::kNone;
  SubmissionOutcome outcome_;
};

// What the engine asks while rows come.
class Head::SubmissionRun::Flow : public RowFlow {
 public:
  explicit Flow(SubmissionRun& run) : run_(run) {}

  // Decide() was OK: what the engine does from then on counts.
  bool decided() const { return decided_; }

  absl::Status AwaitRows(int64_t row_end) override {
    if (absl::Status status = run_.CheckWanted(); !status.ok()) return status;
    return run_.submission_.incoming->AwaitRows(row_end);
  }
  absl::Status Decide(const DigestBuilder* rows) override {
    absl::Status status = run_.Decide(rows);
    decided_ = status.ok();
    return status;
  }
  void GradHiddenReady(int64_t row_end) override { run_.submission_.incoming->GradHiddenReady(row_end); }

 private:
  SubmissionRun& run_;
  bool decided_ = false;
};

bool Head::IsBehindFiles(const Submission& submission) {
  const auto is_taken = [](const std::shared_ptr<Head>& head) { return head != nullptr && head->gate_.IsTakenByFiles(); };
  return std::any_of(submission.terms.begin(), submission.terms.end(),
                     [&](const SubmittedTerm& term) { return is_taken(term.head) || is_taken(term.teacher_head); });
}

absl::Status Head::AwaitFiles(const Submission& submission, const WaitLimits& limits) {
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
  for (Head* head : HeadsOf(submission)) {
    if (absl::Status status = head->gate_.AwaitFiles(limits); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<SubmissionOutcome> Head::Submit(const Submission& submission, LossEngine& engine,
                                               const std::function<bool()>& cancelled) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  // What can be refused is refused without waiting: a duplicate of the micro-batch that is being computed, above all.
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
  // What could not be added when its turn came holds its rows' memory.
  if (absl::Status status = AddInOrder(TargetsOf(submission)); !status.ok()) return status;
  const std::set<Head*, std::less<>> heads = HeadsOf(submission);
  const auto count_calls = [&heads](int64_t change) {
    for (Head* head : heads) {
      absl::MutexLock state_lock(&head->state_mutex_);
      head->running_calls_ += change;
    }
  };
  count_calls(1);
  const absl::Cleanup is_over = [&count_calls] { count_calls(-1); };
  absl::StatusOr<SubmissionOutcome> outcome;
  {
    const std::vector<Head*> targets = TargetsOf(submission);
    const bool may_stage = NeedsSlot(submission) && std::any_of(targets.begin(), targets.end(), [](const Head* head) {
                             return !head->engine_head_->StagesConcurrently();
                           });
    // In deterministic mode nothing is computed together with others: that would show in the answer's last bits.
    const bool alone = may_stage || std::any_of(heads.begin(), heads.end(), [](Head* head) { return head->limits_.deterministic; });
    const ComputeLocks locks(heads, alone ? ComputeMode::kExclusive : ComputeMode::kShared);
    outcome = SubmissionRun(submission, engine, cancelled).Run();
  }
  if (outcome.ok() && outcome->state == ContributionState::kCommitted && !outcome->replayed) {
    if (absl::Status status = AddInOrder(TargetsOf(submission)); !status.ok()) outcome = status;
  }
  return outcome;
}

absl::StatusOr<SubmissionOutcome> Head::SubmissionRun::Run() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  // Again: while this call waited for the locks the heads may have changed. From here on they do not, but for what other runs do.
  if (absl::Status status = CheckSubmission(submission_); !status.ok()) return status;
  BuildTerms();
  if (absl::Status status = Begin(); !status.ok()) return status;
  if (outcome_.needs_all_rows) return std::move(outcome_);
  if (absl::Status status = CheckWanted(); !status.ok()) return Abort(status);
  if (adds_) {
    if (absl::Status status = ChooseForm(); !status.ok()) return Abort(status);
  }
  Flow flow(*this);
  const bool flows = submission_.incoming != nullptr;
  absl::StatusOr<MicroBatchResult> result = Compute(flows ? &flow : nullptr);
  if (HasReason(result.status(), ErrorReason::kStagingFull) && form_ == ContributionForm::kStaged) {
    // A run beside this one has taken the slot that was free (EngineHead::StagesConcurrently): nothing has happened yet.
    if (submission_.hold == nullptr) {
      Head* const full = FirstWithoutSlot();
      result = SlotsTaken(full == nullptr ? *targets_.front() : *full);
    } else {
      form_ = ContributionForm::kHeld;
      result = Compute(flows ? &flow : nullptr);
    }
  }
  bool may_have_added = form_ == ContributionForm::kDirect && (!flows || flow.decided());
  if (result.ok() && flows && !flow.decided()) {
    result = MakeError(ErrorReason::kInternal, "the engine computed without asking for the decision");
    may_have_added = form_ == ContributionForm::kDirect;
  }
  if (!result.ok()) {
    if (may_have_added) return Failed(result.status());
    const absl::Status status = Abort(result.status());
    if (!flows || flow.decided() || !submission_.incoming->stalled()) return status;
    outcome_.needs_all_rows = true;
    return std::move(outcome_);
  }
  outcome_.terms = std::move(result->terms);
  if (adds_) {
    if (absl::Status status = Settle(*result); !status.ok()) return status;
    outcome_.state = submission_.explicit_commit ? ContributionState::kStaged : ContributionState::kCommitted;
    outcome_.form = form_;
  }
  return std::move(outcome_);
}

void Head::SubmissionRun::BuildTerms() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  terms_.reserve(submission_.terms.size());
  for (const SubmittedTerm& submitted : submission_.terms) {
    LossTerm& term = terms_.emplace_back(submitted.term);
    term.head = submitted.head->engine_head_.get();
    term.teacher_head = submitted.teacher_head != nullptr ? submitted.teacher_head->engine_head_.get() : nullptr;
    outcome_.weight_versions.push_back(submitted.head->weights_.version());
    outcome_.teacher_weight_versions.push_back(submitted.teacher_head != nullptr ? submitted.teacher_head->weights_.version() : 0);
  }
}

absl::Status Head::SubmissionRun::CheckWanted() const {
  if (cancelled_ != nullptr && cancelled_()) return Cancelled();
  if (!adds_) return absl::OkStatus();  // a repeat of what is decided is answered whatever attempt waits
  for (Head* target : targets_) {
    absl::MutexLock state_lock(&target->state_mutex_);
    if (target->state_ == HeadState::kLost) return target->LostError();
    const std::optional<int64_t> waiting = target->steps_.HigherWaiting(id(), submission_.attempt);
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

absl::Status Head::SubmissionRun::CheckNotLost() const ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (const Head* target : targets_) {
    if (target->state_ == HeadState::kLost) return target->LostError();
  }
  return absl::OkStatus();
}

absl::StatusOr<BeginDecision> Head::SubmissionRun::BeginIn(Head* target) {
  const int64_t step = target->steps_.open().step;
  if (submission_.incoming == nullptr) {
    return target->steps_.Begin(step, id(), submission_.attempt, submission_.digest, submission_.first_wins);
  }
  const absl::StatusOr<bool> begun = target->steps_.BeginProvisionally(step, id(), submission_.attempt);
  if (!begun.ok()) return begun.status();
  return *begun ? BeginDecision::kCompute : BeginDecision::kReplay;
}

absl::Status Head::SubmissionRun::Begin() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (submission_.incoming == nullptr) outcome_.digest = submission_.digest;
  // All at once: runs that share the compute locks may be about the same micro-batch.
  const StateLocks state_locks(targets_);
  std::vector<std::pair<Head*, std::optional<MicroBatchRecord>>> begun;  // with what they knew of it before
  std::string known_by, new_to;
  absl::Status status = CheckNotLost();
  for (Head* target : targets_) {
    if (!status.ok()) break;
    if (!outcome_.step.has_value()) outcome_.step = target->steps_.open().step;
    const std::optional<MicroBatchRecord> before = target->steps_.ledger().Find(id());
    const absl::StatusOr<BeginDecision> decision = BeginIn(target);
    status = decision.status();
    if (!status.ok()) break;
    if (*decision == BeginDecision::kCompute) {
      begun.emplace_back(target, before);
      new_to = target->name_.ToString();
      continue;
    }
    if (known_by.empty()) {
      const MicroBatchRecord& record = target->steps_.open().micro_batches.at(id());
      outcome_.state = record.state;
      outcome_.form = record.form;
    }
    known_by = target->name_.ToString();
    if (*decision == BeginDecision::kPayloadDiffers) outcome_.payload_differs = true;
  }
  if (status.ok() && submission_.incoming != nullptr && !known_by.empty()) {
    outcome_.needs_all_rows = true;
    outcome_.state = ContributionState::kNone;
    outcome_.form = ContributionForm::kNone;
  } else if (status.ok() && !known_by.empty() && !new_to.empty()) {
    status = MakeError(ErrorReason::kMicroBatchConflict,
                       absl::StrCat("micro-batch ", id(), " is known to ", known_by, " and not to ", new_to,
                                    "; the heads of a micro-batch take it all or not at all"),
                       {{"microBatch", absl::StrCat(id())}, {"knownBy", known_by}, {"notKnownBy", new_to}});
  }
  adds_ = status.ok() && !outcome_.needs_all_rows && !begun.empty();
  for (const auto& [target, before] : begun) {
    if (!adds_) {  // one head takes it and another does not, or its rows have to be there first: nothing has happened
      target->steps_.ledger().TakeBack(id(), before);
      continue;
    }
    target->steps_.DropLowerAttempt(id());
  }
  outcome_.replayed = status.ok() && !known_by.empty() && !outcome_.needs_all_rows && !outcome_.payload_differs;
  return status;
}

absl::Status Head::SubmissionRun::ChooseForm() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  form_ = ContributionForm::kDirect;
  if (submission_.late_token_factors || in_order()) form_ = ContributionForm::kHeld;
  if (in_order() && submission_.hold == nullptr) {
    return MakeError(ErrorReason::kStagingFull, "in deterministic mode every contribution is held, and the call does not allow it",
                     {{"head", targets_.front()->name_.ToString()}});
  }
  if (in_order()) return absl::OkStatus();
  if (!NeedsSlot(submission_)) return absl::OkStatus();
  form_ = ContributionForm::kStaged;
  Head* const full = FirstWithoutSlot();
  if (full == nullptr) return absl::OkStatus();
  if (submission_.hold == nullptr) return SlotsTaken(*full);
  form_ = ContributionForm::kHeld;
  return absl::OkStatus();
}

Head* Head::SubmissionRun::FirstWithoutSlot() const ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (Head* target : targets_) {
    if (target->engine_head_->FreeStagingSlots() <= 0) return target;
  }
  return nullptr;
}

int64_t Head::SubmissionRun::PendingOf(Head& target, bool own, bool is_held) const {
  absl::MutexLock state_lock(&target.state_mutex_);
  return std::count_if(target.steps_.pending().begin(), target.steps_.pending().end(), [&](const auto& entry) {
    const PendingContribution& pending = *entry.second;
    const bool is_own = submission_.session.has_value() && pending.session() == submission_.session;
    return is_own == own && pending.is_held() == is_held && !pending.dropped();
  });
}

absl::Status Head::SubmissionRun::SlotsTaken(Head& target) const {
  const int64_t slots = target.spec_.staging_slots;
  const int64_t own = PendingOf(target, /*own=*/true, /*is_held=*/false);
  ErrorMetadata metadata = {
      {"head", target.name_.ToString()}, {"stagingSlots", absl::StrCat(slots)}, {"ownSlots", absl::StrCat(own)}};
  // Heads by rows have as many slots on each rank.
  if (own < slots || PendingOf(target, /*own=*/false, /*is_held=*/false) > 0) metadata.emplace("retryAfterMs", kSlotRetryAfterMs);
  return MakeError(ErrorReason::kStagingFull,
                   absl::StrCat("all ", slots, " staging slots of ", target.name_.ToString(), " are taken, ", own,
                                " of them by the caller's own session; commit or discard one of its micro-batches, allow this one "
                                "to be held (allow_held), or create the head with more staging_slots"),
                   std::move(metadata));
}

absl::StatusOr<MicroBatchResult> Head::SubmissionRun::Compute(RowFlow* flow) {
  MicroBatch micro_batch;
  micro_batch.hidden = submission_.hidden;
  micro_batch.terms = terms_;
  micro_batch.backward = submission_.backward;
  micro_batch.grad_hidden = submission_.grad_hidden;
  micro_batch.grad_hidden_scale = submission_.grad_hidden_scale;
  micro_batch.refuse_non_finite = submission_.refuse_non_finite;  // never together with kAccumulate, see NeedsSlot()
  if (form_ == ContributionForm::kDirect) micro_batch.grad_weight = GradWeightMode::kAccumulate;
  if (form_ == ContributionForm::kStaged) micro_batch.grad_weight = GradWeightMode::kStage;
  micro_batch.flow = flow;
  micro_batch.digest_rows = flow != nullptr && submission_.engine_digests && submission_.backward;
  micro_batch.after = submission_.after;
  micro_batch.label = submission_.label.empty() ? nullptr : submission_.label.c_str();
  return engine_.Compute(micro_batch);
}

absl::Status Head::SubmissionRun::Decide(const DigestBuilder* rows) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (submission_.backward) {
    absl::StatusOr<Digest> digest = submission_.incoming->Finish(rows);
    if (!digest.ok()) return digest.status();
    outcome_.digest = *digest;
  }
  if (absl::Status status = CheckWanted(); !status.ok() || !adds_) return status;
  const StateLocks state_locks(targets_);
  if (absl::Status status = CheckNotLost(); !status.ok()) return status;
  for (Head* target : targets_) {
    if (absl::Status status = target->steps_.ledger().SetDigest(id(), outcome_.digest); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Head::SubmissionRun::Settle(MicroBatchResult& result) {
  if (form_ == ContributionForm::kDirect) return FinishCommitted();
  if (form_ == ContributionForm::kStaged && result.staged == nullptr) {
    return Abort(
        MakeError(ErrorReason::kInternal, "the engine returned no staged contribution", {{"microBatch", absl::StrCat(id())}}));
  }
  if (absl::Status status = CheckWanted(); !status.ok()) return Abort(status);
  if (form_ == ContributionForm::kHeld && submission_.explicit_commit) return Hold();
  if (in_order()) return TakeItsPlace();
  if (submission_.explicit_commit) {
    return FinishPending(std::make_shared<PendingContribution>(TargetSet(), submission_.attempt, submission_.session,
                                                               std::move(result.staged), submission_.until_decided));
  }
  // EAGER, but refused until now if anything was not finite.
  if (form_ == ContributionForm::kStaged) {
    const absl::Status added = result.staged->Commit(1.0);
    result.staged.reset();
    if (!added.ok()) return Failed(added);
  } else {
    for (LossTerm& term : terms_) term = WithoutOutputs(term);
    MicroBatch again;
    again.hidden = submission_.hidden;
    again.terms = terms_;
    again.backward = true;
    again.grad_weight = GradWeightMode::kAccumulate;
    again.after = submission_.after;
    if (absl::Status added = engine_.Compute(again).status(); !added.ok()) return Failed(added);
  }
  return FinishCommitted();
}

absl::StatusOr<HeldRows> Head::SubmissionRun::KeepRows() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  bool is_first = false;
  for (Head* target : targets_) {
    absl::MutexLock state_lock(&target->state_mutex_);
    is_first = is_first || target->steps_.IsFront(id());
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
    if (!submitted.head->spec_.trainable) continue;  // adds nothing
    LossTerm& term = held.terms.emplace_back(WithoutOutputs(terms_[index]));
    term.teacher_hidden = submitted.term.teacher_hidden;  // hold() may have moved the rows
    if (submitted.teacher_head == nullptr || !teachers.insert(submitted.teacher_head.get()).second) continue;
    held.teachers.push_back(submitted.teacher_head);
    held.teacher_heads.push_back(term.teacher_head);
    held.teacher_weight_versions.push_back(submitted.teacher_head->weights_.version());
  }
  return held;
}

absl::Status Head::SubmissionRun::Hold() {
  absl::StatusOr<HeldRows> held = KeepRows();
  if (!held.ok()) return Abort(held.status());
  return FinishPending(std::make_shared<PendingContribution>(TargetSet(), submission_.attempt, submission_.session,
                                                             *std::move(held), submission_.until_decided));
}

absl::Status Head::SubmissionRun::TakeItsPlace() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  absl::StatusOr<HeldRows> held = KeepRows();
  if (!held.ok()) return Abort(held.status());
  const StateLocks state_locks(targets_);
  WaitInOrder(targets_, id(), *held, CommitArguments());
  for (Head* target : targets_) {
    // Cannot fail: it has been in progress since Begin(), and in this mode nobody else has computed, and lost the head, meanwhile.
    target->steps_.ledger().FinishCommitted(id(), form_, CountsOf(target)).IgnoreError();
    target->changed_.WakeAll();
  }
  return absl::OkStatus();
}

absl::Status Head::SubmissionRun::Abort(const absl::Status& status) {
  if (!adds_) return status;
  for (Head* target : targets_) {
    absl::MutexLock state_lock(&target->state_mutex_);
    // If the head was lost since Begin() it is forgotten already.
    if (target->state_ != HeadState::kLost) target->steps_.ledger().Abort(id()).IgnoreError();
    target->changed_.WakeAll();
  }
  return status;
}

absl::Status Head::SubmissionRun::Failed(const absl::Status& status) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (!IsEngineFailure(status)) return Abort(status);
  for (Head* target : targets_) target->MarkLost(status);
  return status;
}

absl::Status Head::SubmissionRun::FinishPending(const std::shared_ptr<PendingContribution>& pending)
    ABSL_NO_THREAD_SAFETY_ANALYSIS {
  absl::Status status;
  {
    const StateLocks state_locks(targets_);
    status = CheckNotLost();
    if (status.ok()) {
      for (Head* target : targets_) {
        target->steps_.FinishPending(id(), pending, form_, CountsOf(target));  // it has been in progress since Begin()
        target->changed_.WakeAll();
      }
    }
  }
  return status.ok() ? status : Abort(status);
}

absl::Status Head::SubmissionRun::FinishCommitted() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  const StateLocks state_locks(targets_);
  const absl::Status status = CheckNotLost();
  for (Head* target : targets_) {
    // Also in the heads that are left when one is lost: it is in their accumulators. Cannot fail in those.
    target->steps_.ledger().FinishCommitted(id(), form_, CountsOf(target)).IgnoreError();
    target->changed_.WakeAll();
  }
  return status;
}

ContributionCounts Head::SubmissionRun::CountsOf(const Head* head) const {
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

}  // namespace headwater::heads
