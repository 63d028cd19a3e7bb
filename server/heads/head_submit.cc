// Head's way from a complete micro-batch to a settled contribution.
#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
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

bool NeedsStagingSlot(const Submission& submission) { return submission.explicit_commit || submission.refuse_non_finite; }

bool IsEngineFailure(const absl::Status& status) {
  return HasReason(status, ErrorReason::kEngineFailed) || HasReason(status, ErrorReason::kInternal);
}

absl::Status Cancelled() {
  return MakeError(ErrorReason::kCancelled, "the call was cancelled before its micro-batch was decided; nothing was added");
}

}  // namespace

Head* Head::TargetOf(const Submission& submission) {
  if (!submission.backward) return nullptr;
  for (const SubmittedTerm& term : submission.terms) {
    if (term.head != nullptr && term.head->spec_.trainable) return term.head.get();
  }
  return nullptr;
}

absl::Status Head::CheckTerm(const Submission& submission, size_t index, const Head* target) {
  const SubmittedTerm& term = submission.terms[index];
  if (term.head == nullptr) return MissingField(TermField(index, "head"), "in every term");
  const bool is_target = submission.backward && term.head->spec_.trainable;
  if (is_target && term.head.get() != target) {
    return MakeError(ErrorReason::kFeatureNotBuilt,
                     absl::StrCat("micro-batches that add to several trainable heads are not built: ", target->name_.ToString(),
                                  " and ", term.head->name_.ToString()),
                     {{"feature", "several trainable heads in one micro-batch"}, {"field", TermField(index, "head")}});
  }
  const bool is_jsd = std::holds_alternative<JsdSpec>(term.term.loss);
  if (is_jsd && term.teacher_head == nullptr) return MissingField(TermField(index, "teacher"), "for JSD");
  if (!is_jsd && term.teacher_head != nullptr) return InvalidCombination(TermField(index, "teacher"), "for cross entropy");
  if (is_target && !term.head_epoch.has_value()) {
    return MissingField(TermField(index, "head.head_epoch"), "for a backward call against a trainable head");
  }
  if (is_target && !term.step.has_value()) {
    return MissingField(TermField(index, "head.step"), "for a backward call against a trainable head");
  }
  if (!is_target && term.step.has_value() && !submission.backward) {
    return InvalidCombination(TermField(index, "head.step"), "in a forward-only call");
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
      CheckVersion(term.expected_weight_version, weight_version_, name_.ToString(), "head.expected_weight_version");
  if (!version.ok()) return version;
  if (!is_target) return absl::OkStatus();
  const int64_t micro_batch = *submission.micro_batch;
  absl::Status begin = ledger_.CheckBegin(*term.step, micro_batch, submission.attempt, limits_.max_step_micro_batches);
  if (!begin.ok()) return begin;
  if (spec_.staging_slots == 0 && NeedsStagingSlot(submission) && !ledger_.open().micro_batches.contains(micro_batch)) {
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
  return CheckVersion(term.expected_teacher_weight_version, weight_version_, name_.ToString(), "teacher.expected_weight_version");
}

absl::Status Head::CheckSubmission(const Submission& submission) {
  if (submission.terms.empty()) return MissingField("terms", "at least once");
  const Head* target = TargetOf(submission);
  if (target != nullptr && !submission.micro_batch.has_value()) {
    return MissingField("micro_batch", "for a backward call against a trainable head");
  }
  if (!submission.backward && submission.micro_batch.has_value())
    return InvalidCombination("micro_batch", "in a forward-only call");
  if (!submission.backward && submission.grad_hidden.data != nullptr) {
    return InvalidCombination("return_grad_hidden", "in a forward-only call");
  }
  for (size_t index = 0; index < submission.terms.size(); ++index) {
    if (absl::Status status = CheckTerm(submission, index, target); !status.ok()) return status;
  }
  if (target == nullptr && submission.micro_batch.has_value()) {
    const std::string head = submission.terms[0].head->name_.ToString();
    return MakeError(ErrorReason::kHeadNotTrainable, absl::StrCat(head, " is frozen: it takes no micro_batch"),
                     {{"head", head}, {"field", "micro_batch"}});
  }
  return absl::OkStatus();
}

absl::StatusOr<SubmissionOutcome> Head::Submit(const Submission& submission, LossEngine& engine,
                                               const std::function<bool()>& cancelled) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  // What can be refused is refused without waiting: a duplicate of the micro-batch that is being computed, above all.
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;

  std::set<Head*, std::less<Head*>> heads;
  for (const SubmittedTerm& term : submission.terms) {
    heads.insert(term.head.get());
    if (term.teacher_head != nullptr) heads.insert(term.teacher_head.get());
  }
  for (Head* head : heads) {
    absl::MutexLock state_lock(&head->state_mutex_);
    ++head->running_calls_;
  }
  // Ascending addresses, so that two submissions with the same heads in other roles cannot wait for each other.
  for (Head* head : heads) head->compute_mutex_.Lock();
  absl::StatusOr<SubmissionOutcome> outcome = SubmitLocked(submission, TargetOf(submission), engine, cancelled);
  for (Head* head : heads) head->compute_mutex_.Unlock();
  for (Head* head : heads) {
    absl::MutexLock state_lock(&head->state_mutex_);
    --head->running_calls_;
  }
  return outcome;
}

void Head::AbortMicroBatch(int64_t micro_batch) {
  absl::MutexLock state_lock(&state_mutex_);
  // Cannot fail: the micro-batch has been in progress since Begin(), and nobody else changes the ledger meanwhile.
  ledger_.Abort(micro_batch).IgnoreError();
}

absl::StatusOr<SubmissionOutcome> Head::SubmitLocked(const Submission& submission, Head* target, LossEngine& engine,
                                                     const std::function<bool()>& cancelled) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  // Again: while this call waited for the locks the heads may have changed. From here on they do not.
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;

  SubmissionOutcome outcome;
  std::vector<LossTerm> terms;
  terms.reserve(submission.terms.size());
  for (const SubmittedTerm& submitted : submission.terms) {
    LossTerm& term = terms.emplace_back(submitted.term);
    term.head = submitted.head->engine_head_.get();
    term.teacher_head = submitted.teacher_head != nullptr ? submitted.teacher_head->engine_head_.get() : nullptr;
    outcome.weight_versions.push_back(submitted.head->weight_version_);
    outcome.teacher_weight_versions.push_back(submitted.teacher_head != nullptr ? submitted.teacher_head->weight_version_ : 0);
  }
  MicroBatch micro_batch;
  micro_batch.hidden = submission.hidden;
  micro_batch.terms = terms;
  micro_batch.backward = submission.backward;
  micro_batch.grad_hidden = submission.grad_hidden;
  micro_batch.grad_hidden_scale = submission.grad_hidden_scale;
  micro_batch.refuse_non_finite = submission.refuse_non_finite;  // never together with kAccumulate, see NeedsStagingSlot()

  bool adds = false;
  if (target != nullptr) {
    absl::MutexLock state_lock(&target->state_mutex_);
    outcome.step = target->ledger_.open().step;
    absl::StatusOr<BeginDecision> decision =
        target->ledger_.Begin(*outcome.step, *submission.micro_batch, submission.attempt, submission.digest, submission.first_wins,
                              target->limits_.max_step_micro_batches);
    if (!decision.ok()) return decision.status();
    adds = *decision == BeginDecision::kCompute;
    outcome.replayed = *decision == BeginDecision::kReplay;
    outcome.payload_differs = *decision == BeginDecision::kPayloadDiffers;
  }
  if (adds) {
    target->staged_.erase(*submission.micro_batch);  // of a lower attempt, which this one supersedes
    micro_batch.grad_weight = NeedsStagingSlot(submission) ? GradWeightMode::kStage : GradWeightMode::kAccumulate;
  }
  if (cancelled != nullptr && cancelled()) {
    if (adds) target->AbortMicroBatch(*submission.micro_batch);
    return Cancelled();
  }

  absl::StatusOr<MicroBatchResult> result = engine.Compute(micro_batch);
  if (!result.ok()) {
    if (micro_batch.grad_weight == GradWeightMode::kAccumulate && IsEngineFailure(result.status())) {
      target->MarkLost(result.status());
    } else if (adds) {
      target->AbortMicroBatch(*submission.micro_batch);
    }
    return result.status();
  }
  if (adds) {
    if (absl::Status status = target->Settle(submission, *result, cancelled); !status.ok()) return status;
  }
  outcome.terms = std::move(result->terms);
  if (target != nullptr) {
    absl::MutexLock state_lock(&target->state_mutex_);
    const MicroBatchRecord& record = target->ledger_.open().micro_batches.at(*submission.micro_batch);
    outcome.state = record.state;
    outcome.form = record.form;
  }
  return outcome;
}

absl::Status Head::Settle(const Submission& submission, MicroBatchResult& result, const std::function<bool()>& cancelled) {
  const int64_t micro_batch = *submission.micro_batch;
  ContributionCounts counts;
  for (size_t index = 0; index < submission.terms.size(); ++index) {
    if (submission.terms[index].head.get() != this) continue;
    const LossSums& sums = result.terms[index];
    counts.valid_token_count += sums.valid_token_count;
    counts.loss_sum += sums.loss_sum;
    counts.token_weight_sum += sums.token_weight_sum;
    counts.non_finite_row_count += sums.non_finite_row_count;
  }
  if (!NeedsStagingSlot(submission)) {
    absl::MutexLock state_lock(&state_mutex_);
    return ledger_.FinishCommitted(micro_batch, counts);
  }
  if (result.staged == nullptr) {
    AbortMicroBatch(micro_batch);
    return MakeError(ErrorReason::kInternal, "the engine returned no staged contribution",
                     {{"microBatch", absl::StrCat(micro_batch)}});
  }
  if (cancelled != nullptr && cancelled()) {
    result.staged.reset();
    AbortMicroBatch(micro_batch);
    return Cancelled();
  }
  if (submission.explicit_commit) {
    staged_[micro_batch] = std::move(result.staged);
    absl::MutexLock state_lock(&state_mutex_);
    return ledger_.FinishStaged(micro_batch, counts);
  }
  if (absl::Status status = result.staged->Commit(1.0); !status.ok()) {
    result.staged.reset();
    MarkLost(status);
    return status;
  }
  result.staged.reset();
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = ledger_.FinishStaged(micro_batch, counts); !status.ok()) return status;
  return ledger_.FinishCommit(micro_batch, 1.0);
}

}  // namespace headwater::heads
