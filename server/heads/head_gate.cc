#include "server/heads/head_gate.h"

#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {

using scheduler::Waited;
using scheduler::WaitLimits;

namespace {

// The end of a call by its limits. A deadline ends a call's client, too: it is the first cause. Changes on the way here
// stay, such as sealing a step whose contributions are still to be added in order.
absl::Status EndedError(const WaitLimits& limits, const std::string& when) {
  const bool is_late = observability::MonotonicNow() >= limits.deadline;
  return MakeError(
      is_late ? ErrorReason::kDeadlineExceeded : ErrorReason::kCancelled,
      absl::StrCat(is_late ? "the deadline passed " : "the call was cancelled ", when, "; what it was to do then was not done"));
}

}  // namespace

absl::Status HeadDeleted(const HeadName& name) {
  return MakeError(ErrorReason::kHeadNotFound, absl::StrCat("there is no head ", name.ToString(), "; it has been deleted"),
                   {{"head", name.ToString()}});
}

absl::Status CheckInTime(const WaitLimits& limits) {
  const bool goes_on = observability::MonotonicNow() < limits.deadline && (limits.cancelled == nullptr || !limits.cancelled());
  return goes_on ? absl::OkStatus() : EndedError(limits, "before its turn on the head came");
}

bool HeadGate::IsTakenByFiles() const {
  absl::MutexLock lock(&mutex_);
  return IsTaken();
}

Waited HeadGate::AwaitFiles(const WaitLimits& limits) const {
  absl::MutexLock lock(&mutex_);
  while (IsTaken()) {
    const Waited waited = scheduler::WaitForChange(changed_, mutex_, limits);
    if (waited != Waited::kAWhile) return waited;
  }
  return Waited::kAWhile;
}

void HeadGate::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  changed_.SignalAll();
}

absl::Status HeadGate::Wait(const WaitLimits& limits, scheduler::WaitPlace& place) {
  if (absl::Status status = place.Take(); !status.ok()) return status;
  if (scheduler::WaitForChange(changed_, mutex_, limits) == Waited::kAWhile) return absl::OkStatus();
  return EndedError(limits, absl::StrCat("while ", name_.ToString(), " was being saved or set"));
}

absl::Status HeadGate::EnterCall(const WaitLimits& limits) {
  scheduler::WaitPlace place(limits.places);
  absl::MutexLock lock(&mutex_);
  if (file_calls_ > 0) {
    const int64_t turn = file_turn_;
    ++waiting_entries_;
    const absl::Cleanup waits_no_longer = [this, turn]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      --waiting_entries_;
      if (turn != file_turn_ && --due_entries_ == 0) changed_.SignalAll();
    };
    // A call that has waited for a file call need not wait for the next one.
    while (!closed_ && (file_runs_ || (file_calls_ > 0 && turn == file_turn_))) {
      if (absl::Status status = Wait(limits, place); !status.ok()) return status;
    }
  }
  // A deleted head never waits for file calls. Without one, the call finds out by itself that the head is gone.
  if (closed_ && file_runs_) return HeadDeleted(name_);
  ++entries_;
  return absl::OkStatus();
}

void HeadGate::LeaveCall() {
  absl::MutexLock lock(&mutex_);
  if (--entries_ == 0 && file_calls_ > 0) changed_.SignalAll();
}

absl::Status HeadGate::EnterFiles(const WaitLimits& limits) {
  scheduler::WaitPlace place(limits.places);
  absl::MutexLock lock(&mutex_);
  ++file_calls_;
  absl::Cleanup give_up = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (--file_calls_ == 0) changed_.SignalAll();
  };
  while (!closed_ && !MayFilesBegin()) {
    if (absl::Status status = Wait(limits, place); !status.ok()) return status;
  }
  if (closed_) return HeadDeleted(name_);
  file_runs_ = true;
  std::move(give_up).Cancel();
  return absl::OkStatus();
}

bool HeadGate::TryEnterFiles() {
  absl::MutexLock lock(&mutex_);
  if (closed_ || !MayFilesBegin()) return false;
  ++file_calls_;
  file_runs_ = true;
  return true;
}

void HeadGate::LeaveFiles() {
  absl::MutexLock lock(&mutex_);
  file_runs_ = false;
  --file_calls_;
  ++file_turn_;
  due_entries_ = waiting_entries_;
  changed_.SignalAll();
}

}  // namespace headwater::heads
