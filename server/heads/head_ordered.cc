// Head in deterministic mode: what may come, what waits, and the additions in ascending id.
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/compute_locks.h"
#include "server/heads/head.h"

namespace headwater::heads {
namespace {

// After how long one that was refused may find room.
constexpr char kRetryAfterMs[] = "500";

}  // namespace

absl::Status Head::CheckOrder(int64_t micro_batch) const {
  if (window_ == nullptr) return absl::OkStatus();
  const StepRecord& open = ledger_.open();
  const auto found = open.micro_batches.find(micro_batch);
  // A repeat of one that is there adds nothing; a higher attempt of one that is undecided takes its place.
  const bool is_there = found != open.micro_batches.end() && found->second.state != ContributionState::kNone &&
                        found->second.state != ContributionState::kDiscarded;
  if (is_there) return absl::OkStatus();
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

absl::Status Head::WindowFull(int64_t micro_batch, const std::string& why) const {
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

absl::Status Head::CheckNothingWaits() const {
  if (!HasWaiting()) return absl::OkStatus();
  const int64_t step = ledger_.open().step;
  return MakeError(ErrorReason::kStepNotSealed,
                   absl::StrCat(window_->waiting_count(), " contributions of step ", step,
                                " wait to be added, and the lowest one that is missing is micro-batch ", window_->FirstMissing(),
                                "; seal the step first"),
                   {{"step", absl::StrCat(step)}, {"openStep", absl::StrCat(step)}});
}

absl::Status Head::AwaitTurn(const StepKey& key, int64_t micro_batch, const WaitLimits& limits) const {
  if (window_ == nullptr) return absl::OkStatus();
  absl::MutexLock state_lock(&state_mutex_);
  while (!IsItsTurn(key, micro_batch)) {
    const scheduler::Waited waited = WaitForChange(limits);
    if (waited == scheduler::Waited::kCancelled) {
      return MakeError(ErrorReason::kCancelled,
                       absl::StrCat("the call was cancelled while micro-batch ", micro_batch, " waited for its turn"));
    }
    if (waited == scheduler::Waited::kTooLong) break;
  }
  return absl::OkStatus();
}

bool Head::HasItsTurn(const StepKey& key, int64_t micro_batch) const {
  absl::MutexLock state_lock(&state_mutex_);
  return window_ == nullptr || IsItsTurn(key, micro_batch);
}

bool Head::IsItsTurn(const StepKey& key, int64_t micro_batch) const {
  // Anything but a missing predecessor is for the call itself to find out.
  if (retired_ || state_ != HeadState::kReady || key.epoch != epoch_ || key.step != ledger_.open().step) return true;
  const auto found = ledger_.open().micro_batches.find(micro_batch);
  const bool is_committed = found != ledger_.open().micro_batches.end() && found->second.state == ContributionState::kCommitted;
  return is_committed || ledger_.open().state != StepState::kOpen || window_->HasPassed(micro_batch) ||
         window_->IsFront(micro_batch);
}

// ---- additions -------------------------------------------------------------------------------------------------------

std::shared_ptr<const WaitingAddition> Head::MakeWaiting(int64_t micro_batch, const HeldRows& held,
                                                         const CommitArguments& arguments) const {
  auto waiting = std::make_shared<WaitingAddition>();
  waiting->micro_batch = micro_batch;
  waiting->arguments = arguments;
  waiting->rows.hidden = held.hidden;
  waiting->rows.storage = held.storage;
  std::set<const EngineHead*> teachers;
  for (const LossTerm& term : held.terms) {
    if (term.head != engine_head_.get()) continue;
    waiting->rows.terms.push_back(term);
    if (term.teacher_head != nullptr) teachers.insert(term.teacher_head);
  }
  for (size_t i = 0; i < held.teachers.size(); ++i) {
    if (!teachers.contains(held.teacher_heads[i])) continue;
    waiting->rows.teachers.push_back(held.teachers[i]);
    waiting->rows.teacher_heads.push_back(held.teacher_heads[i]);
    waiting->rows.teacher_weight_versions.push_back(held.teacher_weight_versions[i]);
  }
  return waiting;
}

void Head::WaitInOrder(const std::vector<Head*>& heads, int64_t micro_batch, const HeldRows& held,
                       const CommitArguments& arguments) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (Head* head : heads) head->window_->Wait(head->MakeWaiting(micro_batch, held, arguments));
}

std::shared_ptr<const WaitingAddition> Head::NextInOrder() const {
  if (retired_ || state_ != HeadState::kReady) return nullptr;
  return window_->Next(ledger_.open().state == StepState::kSealed);
}

absl::Status Head::AddInOrder(const WaitLimits& limits) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (window_ == nullptr) return absl::OkStatus();
  while (true) {
    std::shared_ptr<const WaitingAddition> next;
    {
      absl::MutexLock state_lock(&state_mutex_);
      next = NextInOrder();
    }
    if (next == nullptr) return absl::OkStatus();
    std::vector<std::shared_ptr<Head>> teachers;
    std::set<Head*, std::less<>> heads = {this};
    for (const std::weak_ptr<Head>& teacher : next->rows.teachers) {
      teachers.push_back(teacher.lock());
      if (teachers.back() != nullptr) heads.insert(teachers.back().get());
    }
    const HeadGate::Entry entry(GatesOf(heads), limits);
    if (!entry.status().ok()) return entry.status();
    const ComputeLocks locks(std::move(heads));
    {
      absl::MutexLock state_lock(&state_mutex_);
      if (NextInOrder() != next) continue;  // another call has added it, or its step is gone
    }
    for (size_t i = 0; i < teachers.size(); ++i) {
      const absl::Status teacher = CheckHeldTeacher(teachers[i].get(), next->rows.teacher_weight_versions[i]);
      if (teacher.ok()) continue;
      // It was committed, and what it would have added can no longer be computed.
      const absl::Status lost = MakeError(
          ErrorReason::kEngineFailed, absl::StrCat("micro-batch ", next->micro_batch,
                                                   " was committed and waited for its turn, but ", std::string(teacher.message())));
      MarkLost(lost);
      return lost;
    }
    if (absl::Status status = AddHeld(next->rows, next->arguments, engine_); !status.ok()) {
      if (IsEngineFailure(status)) MarkLost(status);
      return status;
    }
    absl::MutexLock state_lock(&state_mutex_);
    window_->MarkAdded(next->micro_batch);
    changed_.SignalAll();
  }
}

absl::Status Head::AddInOrder(const std::vector<Head*>& heads) {
  const WaitLimits not_behind_files = {};
  for (Head* head : heads) {
    absl::Status status = head->AddInOrder(not_behind_files);
    // What else fails leaves the contribution waiting, to be added by the next submission, decision or gradient, or by the seal.
    if (IsEngineFailure(status)) return status;
  }
  return absl::OkStatus();
}

}  // namespace headwater::heads
