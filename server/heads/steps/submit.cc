#include "server/heads/steps/submit.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/head.h"
#include "server/heads/head_core.h"
#include "server/heads/steps/submission_run.h"

namespace headwater::heads {
namespace {

absl::Status CheckVersion(const std::optional<int64_t>& expected, int64_t actual, const std::string& head,
                          const std::string& field) {
  if (!expected.has_value() || *expected == actual) return absl::OkStatus();
  return MakeError(
      ErrorReason::kWeightVersionMismatch,
      absl::StrCat("the call expects version ", *expected, " of the weights of ", head, ", they are of version ", actual),
      {{"field", field}, {"expected", absl::StrCat(*expected)}, {"actual", absl::StrCat(actual)}});
}

// The heads of a submission, each once.
std::vector<HeadCore*> HeadsOf(const Submission& submission) {
  std::vector<HeadCore*> heads;
  const auto add = [&heads](const std::shared_ptr<Head>& head) {
    if (head != nullptr && std::find(heads.begin(), heads.end(), &head->core()) == heads.end()) heads.push_back(&head->core());
  };
  for (const SubmittedTerm& term : submission.terms) {
    add(term.head);
    add(term.teacher_head);
  }
  return heads;
}

bool Contains(const std::vector<HeadCore*>& heads, const HeadCore* head) {
  return std::find(heads.begin(), heads.end(), head) != heads.end();
}

// ---- what can be refused at once -------------------------------------------------------------------------------------

absl::Status CheckAsStudent(HeadCore& head, const SubmittedTerm& term, bool is_target, const Submission& submission) {
  const Turn turn(head.sequencer);
  const bool names_step = is_target || term.step.has_value();
  if (absl::Status status = head.Check(term.head_epoch.has_value() ? &*term.head_epoch : nullptr, Need::kReady, names_step);
      !status.ok()) {
    return status;
  }
  absl::Status version =
      CheckVersion(term.expected_weight_version, head.weights.version(), head.name.ToString(), "head.expected_weight_version");
  if (!version.ok()) return version;
  if (!is_target) return absl::OkStatus();
  const int64_t micro_batch = *submission.micro_batch;
  absl::Status begin = head.steps.CheckBegin(*term.step, micro_batch, submission.attempt);
  if (!begin.ok()) return begin;
  const bool needs_slot = NeedsSlot(submission) && submission.hold == nullptr;
  if (head.spec.staging_slots == 0 && needs_slot && !head.steps.open().micro_batches.contains(micro_batch)) {
    return MakeError(
        ErrorReason::kStagingFull,
        absl::StrCat(head.name.ToString(), " was created without staging slots, which EXPLICIT commits and REFUSE need"),
        {{"head", head.name.ToString()}, {"stagingSlots", "0"}});
  }
  return absl::OkStatus();
}

absl::Status CheckAsTeacher(HeadCore& head, const SubmittedTerm& term) {
  const Turn turn(head.sequencer);
  const Epoch* epoch = term.teacher_head_epoch.has_value() ? &*term.teacher_head_epoch : nullptr;
  if (absl::Status status = head.Check(epoch, Need::kReady, false); !status.ok()) return status;
  return CheckVersion(term.expected_teacher_weight_version, head.weights.version(), head.name.ToString(),
                      "teacher.expected_weight_version");
}

}  // namespace

absl::Status CheckSubmission(const Submission& submission) {
  for (const SubmittedTerm& term : submission.terms) {
    const bool is_target = submission.backward && term.head->spec().trainable;
    if (absl::Status status = CheckAsStudent(term.head->core(), term, is_target, submission); !status.ok()) return status;
    if (term.teacher_head == nullptr) continue;
    if (absl::Status status = CheckAsTeacher(term.teacher_head->core(), term); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Announce(const Submission& submission, const WaitLimits& limits) {
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
  const std::vector<HeadCore*> targets = TargetsOf(submission);
  if (submission.attempt == 0 || targets.empty()) return absl::OkStatus();
  const int64_t micro_batch = *submission.micro_batch;
  scheduler::Sequencer& sequencer = targets.front()->sequencer;
  const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
    if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
    scheduler::Needs needed;
    for (HeadCore* target : targets) {
      target->steps.waiting_attempts().Mark(micro_batch, submission.attempt);  // a lower attempt that is being computed gives up
      AddNeed(*target, kChangesGradient, needed);
    }
    return needed;
  };
  const absl::StatusOr<scheduler::Admission> admission = sequencer.Acquire(needs, limits, kWaitsForHead);
  const Turn turn(sequencer);
  for (HeadCore* target : targets) target->steps.waiting_attempts().Unmark(micro_batch, submission.attempt);
  if (!admission.ok()) return admission.status();
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
  for (const SubmittedTerm& term : submission.terms) {
    HeadCore& head = term.head->core();
    if (!head.spec.trainable) continue;
    absl::Status status = head.steps.Supersede(*term.step, micro_batch, submission.attempt);
    if (!status.ok()) return status;
    head.MicroBatchChanged();
  }
  return absl::OkStatus();
}

// ---- submissions -----------------------------------------------------------------------------------------------------

bool IsBehindFiles(const Submission& submission) {
  const Turn turn(submission.terms.front().head->core().sequencer);
  const std::vector<HeadCore*> heads = HeadsOf(submission);
  return std::any_of(heads.begin(), heads.end(),
                     [](const HeadCore* head) { return !head->retired && scheduler::Sequencer::IsWritten(*head->record); });
}

absl::Status AwaitFiles(const Submission& submission, const WaitLimits& limits) {
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
  const std::vector<HeadCore*> heads = HeadsOf(submission);
  const auto needs = [&heads] {
    scheduler::Needs needed;
    for (const HeadCore* head : heads) {
      if (!head->retired) AddNeed(*head, kReadsWeights, needed);  // for a deleted one there is nothing to wait for
    }
    return needed;
  };
  return heads.front()->sequencer.Acquire(needs, limits, kWaitsForHead).status();
}

absl::StatusOr<SubmissionOutcome> Submit(const Submission& submission, LossEngine& engine, const std::function<bool()>& cancelled) {
  // A submission that can be refused is refused without waiting: a duplicate of the micro-batch that is being computed, above all.
  if (absl::Status status = CheckSubmission(submission); !status.ok()) return status;
  const std::vector<HeadCore*> heads = HeadsOf(submission), targets = TargetsOf(submission);
  // A contribution that could not be added when its turn came holds its rows' memory.
  if (absl::Status status = AddInOrder(targets); !status.ok()) return status;
  scheduler::Sequencer& sequencer = heads.front()->sequencer;
  const auto count_calls = [&](int64_t change) {
    const Turn turn(sequencer);
    for (HeadCore* head : heads) head->running_calls += change;
  };
  count_calls(1);
  const absl::Cleanup is_over = [&count_calls] { count_calls(-1); };
  const bool may_stage = NeedsSlot(submission) && std::any_of(targets.begin(), targets.end(), [](const HeadCore* head) {
                           return !head->on_engine->StagesConcurrently();
                         });
  const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
    scheduler::Needs needed;
    for (const HeadCore* head : heads) {
      if (head->retired) return HeadDeleted(head->name);
      const bool adds = !may_stage && !head->limits.deterministic && Contains(targets, head);
      AddNeed(*head, adds ? kSharesGradient : Contains(targets, head) ? kChangesGradient : head->reads(), needed);
    }
    return needed;
  };
  absl::StatusOr<SubmissionOutcome> outcome;
  {
    const auto admission = sequencer.Acquire(needs, scheduler::AsLongAsItTakes(), kWaitsForHead);
    if (!admission.ok()) return admission.status();
    outcome = SubmissionRun(submission, engine, cancelled).Run();
  }
  if (outcome.ok() && outcome->state == ContributionState::kCommitted && !outcome->replayed) {
    if (absl::Status status = AddInOrder(targets); !status.ok()) outcome = status;
  }
  return outcome;
}

}  // namespace headwater::heads
