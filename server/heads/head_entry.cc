#include "server/heads/head_entry.h"

#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {
namespace {

// Of a call that is to go on no longer. A deadline ends a call's client, too: it is the first cause. What the call did on its way
// here, such as sealing a step whose contributions are still to be added in order, stays.
absl::Status EndedError(const WaitLimits& limits, const std::string& when) {
  const bool is_late = observability::MonotonicNow() >= limits.deadline;
  return MakeError(
      is_late ? ErrorReason::kDeadlineExceeded : ErrorReason::kCancelled,
      absl::StrCat(is_late ? "the deadline passed " : "the call was cancelled ", when, "; what it was to do then was not done"));
}

}  // namespace

absl::Status Head::WaitForFiles(const WaitLimits& limits, scheduler::WaitPlace& place) const {
  if (absl::Status status = place.Take(); !status.ok()) return status;
  if (WaitForChange(limits) == scheduler::Waited::kAWhile) return absl::OkStatus();
  return EndedError(limits, absl::StrCat("while ", name_.ToString(), " was being saved or set"));
}

absl::Status Head::CheckInTime(const WaitLimits& limits) {
  const bool goes_on = observability::MonotonicNow() < limits.deadline && (limits.cancelled == nullptr || !limits.cancelled());
  return goes_on ? absl::OkStatus() : EndedError(limits, "before its turn on the head came");
}

absl::Status Head::EnterCall(const WaitLimits& limits) const {
  scheduler::WaitPlace place(limits.places);
  absl::MutexLock state_lock(&state_mutex_);
  if (file_calls_ > 0) {
    const int64_t turn = file_turn_;
    ++waiting_entries_;
    const absl::Cleanup waits_no_longer = [this, turn]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      --waiting_entries_;
      if (turn != file_turn_ && --due_entries_ == 0) changed_.SignalAll();
    };
    // One that has waited for a file call need not wait for the next one.
    while (!retired_ && (file_runs_ || (file_calls_ > 0 && turn == file_turn_))) {
      if (absl::Status status = WaitForFiles(limits, place); !status.ok()) return status;
    }
  }
  // Of a head that has been deleted nobody waits for files any more; that there is none is for the call to find out, else.
  if (retired_ && file_runs_) return Check(nullptr, Need::kAnyState, false);
  ++entries_;
  return absl::OkStatus();
}

void Head::LeaveCall() const {
  absl::MutexLock state_lock(&state_mutex_);
  if (--entries_ == 0 && file_calls_ > 0) changed_.SignalAll();
}

absl::Status Head::EnterFiles(const WaitLimits& limits) {
  scheduler::WaitPlace place(limits.places);
  absl::MutexLock state_lock(&state_mutex_);
  ++file_calls_;
  absl::Cleanup give_up = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (--file_calls_ == 0) changed_.SignalAll();
  };
  while (!retired_ && !MayFilesBegin()) {
    if (absl::Status status = WaitForFiles(limits, place); !status.ok()) return status;
  }
  if (retired_) return Check(nullptr, Need::kAnyState, false);
  file_runs_ = true;
  std::move(give_up).Cancel();
  return absl::OkStatus();
}

bool Head::TryEnterFiles() {
  absl::MutexLock state_lock(&state_mutex_);
  if (retired_ || !MayFilesBegin()) return false;
  ++file_calls_;
  file_runs_ = true;
  return true;
}

void Head::LeaveFiles() {
  absl::MutexLock state_lock(&state_mutex_);
  file_runs_ = false;
  --file_calls_;
  ++file_turn_;
  due_entries_ = waiting_entries_;
  changed_.SignalAll();
}

}  // namespace headwater::heads
