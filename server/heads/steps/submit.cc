#include "server/heads/steps/submit.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/head.h"

namespace headwater::heads {
namespace {

// ---- what can be refused at once -------------------------------------------------------------------------------------

absl::Status CheckAsStudent(Head& head, const SubmittedTerm& term, bool is_target, const Submission& submission) {
  const Turn turn(head.sequencer);
  const bool names_step = is_target || term.step.has_value();
  HEADWATER_RETURN_IF_ERROR(head.Check(term.head_epoch, Need::kReady, names_step));
  HEADWATER_RETURN_IF_ERROR(head.CheckVersion(term.expected_weight_version, "head.expected_weight_version"));
  if (!is_target) return absl::OkStatus();
  const int64_t micro_batch = *submission.micro_batch;
  HEADWATER_RETURN_IF_ERROR(head.steps.CheckBegin(*term.step, micro_batch, submission.attempt));
  const bool needs_slot = NeedsSlot(submission) && submission.hold == nullptr;
  if (head.spec().staging_slots == 0 && needs_slot && !head.steps.open().micro_batches.contains(micro_batch)) {
    return MakeError(
        ErrorReason::kStagingFull,
        absl::StrCat(head.name().ToString(), " was created without staging slots, which EXPLICIT commits and REFUSE need"),
        {{"head", head.name().ToString()}, {"stagingSlots", "0"}});
  }
  return absl::OkStatus();
}

absl::Status CheckAsTeacher(Head& head, const SubmittedTerm& term) {
  const Turn turn(head.sequencer);
  HEADWATER_RETURN_IF_ERROR(head.Check(term.teacher_head_epoch, Need::kReady, false));
  return head.CheckVersion(term.expected_teacher_weight_version, "teacher.expected_weight_version");
}

}  // namespace

absl::Status CheckSubmission(const Submission& submission) {
  for (const SubmittedTerm& term : submission.terms) {
    const bool is_target = submission.backward && term.head->spec().trainable;
    HEADWATER_RETURN_IF_ERROR(CheckAsStudent(*term.head, term, is_target, submission));
    if (term.teacher_head == nullptr) continue;
    HEADWATER_RETURN_IF_ERROR(CheckAsTeacher(*term.teacher_head, term));
  }
  return absl::OkStatus();
}

absl::Status Announce(const Submission& submission, const WaitLimits& limits) {
  HEADWATER_RETURN_IF_ERROR(CheckSubmission(submission));
  const std::vector<Head*> targets = TargetsOf(submission);
  if (submission.attempt == 0 || targets.empty()) return absl::OkStatus();
  const int64_t micro_batch = *submission.micro_batch;
  scheduler::Sequencer& sequencer = targets.front()->sequencer;
  const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
    HEADWATER_RETURN_IF_ERROR(CheckSubmission(submission));
    scheduler::Needs needed;
    for (Head* target : targets) {
      target->steps.waiting_attempts().Mark(micro_batch, submission.attempt);  // a lower attempt that is being computed gives up
      target->AddNeed(kChangesGradient, needed);
    }
    return needed;
  };
  const absl::StatusOr<scheduler::Admission> admission = sequencer.Acquire(needs, limits, kWaitsForHead);
  const Turn turn(sequencer);
  for (Head* target : targets) target->steps.waiting_attempts().Unmark(micro_batch, submission.attempt);
  if (!admission.ok()) return admission.status();
  for (const SubmittedTerm& term : submission.terms) {
    Head& head = *term.head;
    if (!head.spec().trainable) continue;
    HEADWATER_RETURN_IF_ERROR(head.steps.Supersede(*term.step, micro_batch, submission.attempt));
  }
  return absl::OkStatus();
}

// ---- submissions -----------------------------------------------------------------------------------------------------

bool IsBehindFiles(const Submission& submission) {
  const Turn turn(submission.terms.front().head->sequencer);
  const std::vector<Head*> heads = HeadsOf(submission);
  return std::any_of(heads.begin(), heads.end(),
                     [](const Head* head) { return !head->retired && scheduler::Sequencer::IsWritten(*head->record); });
}

absl::Status AwaitFiles(const Submission& submission, const WaitLimits& limits) {
  HEADWATER_RETURN_IF_ERROR(CheckSubmission(submission));
  const std::vector<Head*> heads = HeadsOf(submission);
  const auto needs = [&heads] {
    scheduler::Needs needed;
    for (const Head* head : heads) {
      if (!head->retired) head->AddNeed(kReadsWeights, needed);  // for a deleted one there is nothing to wait for
    }
    return needed;
  };
  return heads.front()->sequencer.Acquire(needs, limits, kWaitsForHead).status();
}

}  // namespace headwater::heads
