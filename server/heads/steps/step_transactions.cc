#include "server/heads/steps/step_transactions.h"

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::heads {
namespace {

// The hint when a refused contribution may find room.
constexpr char kRetryAfterMs[] = "500";

}  // namespace

StepTransactions::StepTransactions(const HeadName& name, const HeadSpec& spec, const HeadLimits& limits)
    : name_(name),
      ledger_(spec.initial_step, limits.max_step_micro_batches),
      window_(limits.deterministic && spec.trainable ? std::make_unique<OrderedWindow>(limits.ordered_window) : nullptr) {}

bool StepTransactions::HasContributions() const {
  return open().state == StepState::kSealed || open().HasUndecided() || open().Totals().micro_batch_count > 0;
}

// ---- the step's end --------------------------------------------------------------------------------------------------

absl::Status StepTransactions::Close(int64_t step, StepState how) {
  HEADWATER_RETURN_IF_ERROR(ledger_.Close(step, how));
  DropAll();
  last_apply_.reset();
  return absl::OkStatus();
}

void StepTransactions::Reset(int64_t step) {
  DropAll();
  ledger_.Reset(step);
  last_apply_.reset();
}

void StepTransactions::DropAll() {
  for (const auto& [id, pending] : pending_) pending->Drop();
  pending_.clear();
  if (window_ != nullptr) window_->Clear();
}

void StepTransactions::Drop(int64_t micro_batch) {
  const auto found = pending_.find(micro_batch);
  if (found == pending_.end()) return;
  found->second->Drop();
  pending_.erase(found);
}

// ---- begin -----------------------------------------------------------------------------------------------------------

absl::Status StepTransactions::CheckBegin(int64_t step, int64_t micro_batch, int64_t attempt) const {
  HEADWATER_RETURN_IF_ERROR(ledger_.CheckBegin(step, micro_batch, attempt));
  return CheckOrder(micro_batch);
}

void StepTransactions::DropLowerAttempt(int64_t micro_batch) {
  Drop(micro_batch);
  if (window_ != nullptr) window_->Reopen(micro_batch);
}

absl::Status StepTransactions::Supersede(int64_t step, int64_t micro_batch, int64_t attempt) {
  HEADWATER_ASSIGN_OR_RETURN(const bool dropped, ledger_.Supersede(step, micro_batch, attempt));
  if (dropped) Drop(micro_batch);
  return absl::OkStatus();
}

// ---- decisions -------------------------------------------------------------------------------------------------------

std::shared_ptr<PendingContribution> StepTransactions::FindPending(int64_t micro_batch) const {
  const auto found = pending_.find(micro_batch);
  return found == pending_.end() ? nullptr : found->second;
}

void StepTransactions::FinishPending(int64_t micro_batch, std::shared_ptr<PendingContribution> pending, ContributionForm form,
                                     const ContributionCounts& counts) {
  pending_[micro_batch] = std::move(pending);
  ledger_.FinishStaged(micro_batch, form, counts).IgnoreError();
}

void StepTransactions::FinishCommit(int64_t micro_batch, const CommitFactor& factor) {
  ledger_.FinishCommit(micro_batch, factor).IgnoreError();
  pending_.erase(micro_batch);
}

absl::StatusOr<bool> StepTransactions::Discard(int64_t step, int64_t micro_batch, int64_t attempt) {
  HEADWATER_ASSIGN_OR_RETURN(const bool dropped, ledger_.Discard(step, micro_batch, attempt));
  Drop(micro_batch);
  const MicroBatchRecord* const record = open().Find(micro_batch);
  if (window_ != nullptr && record != nullptr && record->state == ContributionState::kDiscarded) window_->Close(micro_batch);
  return dropped;
}

void StepTransactions::Settle() {
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    if (!entry->second->dropped()) {
      ++entry;
      continue;
    }
    // Cannot fail: what is pending is staged in the open step.
    const DiscardedBy by = entry->second->session_has_ended() ? DiscardedBy::kSession : DiscardedBy::kHead;
    ledger_.Discard(open().step, entry->first, entry->second->attempt(), by).IgnoreError();
    entry = pending_.erase(entry);
  }
}

int64_t StepTransactions::DropSession(const SessionId& session) {
  int64_t dropped = 0;
  for (const auto& [id, pending] : pending_) {
    if (pending->session() == session && pending->DropWithSession()) ++dropped;
  }
  Settle();
  return dropped;
}

// ---- order -----------------------------------------------------------------------------------------------------------

absl::Status StepTransactions::CheckOrder(int64_t micro_batch) const {
  if (window_ == nullptr) return absl::OkStatus();
  const StepRecord& open = ledger_.open();
  // A repeat of one that is there adds nothing; a higher attempt of one that is undecided takes its place.
  const MicroBatchRecord* const record = open.Find(micro_batch);
  if (record != nullptr && record->IsPresent()) return absl::OkStatus();
  ErrorMetadata metadata = {{"step", absl::StrCat(open.step)}, {"microBatch", absl::StrCat(micro_batch)}};
  if (window_->HasPassed(micro_batch)) {
    return MakeError(
        ErrorReason::kOrderPassed,
        absl::StrCat("micro-batch ", micro_batch, " of step ", open.step,
                     " was discarded, and a higher one has been added since; in deterministic mode no attempt of it can "
                     "be added any more"),
        std::move(metadata));
  }
  if (window_->IsFront(micro_batch) || window_->HasRoom(static_cast<int64_t>(pending_.size()))) return absl::OkStatus();
  return WindowFull(micro_batch, absl::StrCat("and ", window_->capacity(), " (ordered_window) that wait are there already"));
}

absl::Status StepTransactions::WindowFull(int64_t micro_batch, const std::string& why) const {
  const int64_t step = ledger_.open().step;
  const int64_t missing = window_->FirstMissing();
  return MakeError(ErrorReason::kOrderedWindowFull,
                   absl::StrCat("micro-batch ", micro_batch, " of step ", step, " would have to wait for ", missing, " (",
                                name_.ToString(), " adds in ascending id), ", why, "; try again"),
                   {{"limit", "ordered_window"},
                    {"maximum", absl::StrCat(window_->capacity())},
                    {"step", absl::StrCat(step)},
                    {"microBatch", absl::StrCat(micro_batch)},
                    {"missing", absl::StrCat(missing)},
                    {"retryAfterMs", kRetryAfterMs}});
}

absl::Status StepTransactions::CheckNothingWaits() const {
  if (waiting_count() == 0) return absl::OkStatus();
  const int64_t step = ledger_.open().step;
  return MakeError(ErrorReason::kStepNotSealed,
                   absl::StrCat(window_->waiting_count(), " contributions of step ", step,
                                " wait to be added, and the lowest one that is missing is micro-batch ", window_->FirstMissing(),
                                "; seal the step first"),
                   {{"step", absl::StrCat(step)}, {"openStep", absl::StrCat(step)}});
}

bool StepTransactions::IsDue(int64_t micro_batch) const {
  const MicroBatchRecord* const record = open().Find(micro_batch);
  const bool is_committed = record != nullptr && record->state == ContributionState::kCommitted;
  return is_committed || open().state != StepState::kOpen || window_->HasPassed(micro_batch) || window_->IsFront(micro_batch);
}

void StepTransactions::Wait(int64_t micro_batch, const HeldRows& held, const CommitArguments& arguments, const EngineHead& head) {
  auto waiting = std::make_shared<WaitingAddition>();
  waiting->micro_batch = micro_batch;
  waiting->arguments = arguments;
  waiting->rows.hidden = held.hidden;
  waiting->rows.storage = held.storage;
  std::set<const EngineHead*> teachers;
  for (const LossTerm& term : held.terms) {
    if (term.head != &head) continue;
    waiting->rows.terms.push_back(term);
    if (term.teacher_head != nullptr) teachers.insert(term.teacher_head);
  }
  for (const HeldRows::Teacher& teacher : held.teachers) {
    if (teachers.contains(teacher.on_engine)) waiting->rows.teachers.push_back(teacher);
  }
  window_->Wait(std::move(waiting));
}

void StepTransactions::MarkAdded(int64_t micro_batch) {
  if (window_ != nullptr) window_->MarkAdded(micro_batch);
}

}  // namespace headwater::heads
