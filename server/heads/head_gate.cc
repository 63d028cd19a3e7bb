#include "server/heads/head_gate.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::heads {

using scheduler::WaitLimits;

absl::Status HeadDeleted(const HeadName& name) {
  return MakeError(ErrorReason::kHeadNotFound, absl::StrCat("there is no head ", name.ToString(), "; it has been deleted"),
                   {{"head", name.ToString()}});
}

absl::Status CheckInTime(const WaitLimits& limits) { return scheduler::CheckInTime(limits, "waited for its turn on the head"); }

bool HeadGate::IsTakenByFiles() const {
  absl::MutexLock lock(&mutex_);
  return IsTaken();
}

absl::Status HeadGate::AwaitFiles(const WaitLimits& limits) const {
  absl::MutexLock lock(&mutex_);
  while (IsTaken()) {
    if (absl::Status status = WaitForTurn(limits); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void HeadGate::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  changed_.WakeAll();
}

absl::Status HeadGate::WaitForTurn(const WaitLimits& limits) const {
  scheduler::ThreadWaiter thread([&limits] { return limits.waiter != nullptr && limits.waiter->cancelled(); },
                                 limits.waiter == nullptr ? nullptr : limits.waiter->calls());
  return Wait(changed_, mutex_, {limits.deadline, &thread}, "waited for its head to be saved or set");
}

absl::Status HeadGate::EnterCall(const WaitLimits& limits) {
  absl::MutexLock lock(&mutex_);
  if (file_calls_ > 0) {
    const int64_t turn = file_turn_;
    ++waiting_entries_;
    const absl::Cleanup waits_no_longer = [this, turn]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      --waiting_entries_;
      if (turn != file_turn_ && --due_entries_ == 0) changed_.WakeAll();
    };
    // A call that has waited for a file call need not wait for the next one.
    while (!closed_ && (file_runs_ || (file_calls_ > 0 && turn == file_turn_))) {
      if (absl::Status status = WaitForTurn(limits); !status.ok()) return status;
    }
  }
  // A deleted head never waits for file calls. Without one, the call finds out by itself that the head is gone.
  if (closed_ && file_runs_) return HeadDeleted(name_);
  ++entries_;
  return absl::OkStatus();
}

void HeadGate::LeaveCall() {
  absl::MutexLock lock(&mutex_);
  if (--entries_ == 0 && file_calls_ > 0) changed_.WakeAll();
}

absl::Status HeadGate::EnterFiles(const WaitLimits& limits) {
  absl::MutexLock lock(&mutex_);
  ++file_calls_;
  absl::Cleanup give_up = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (--file_calls_ == 0) changed_.WakeAll();
  };
  while (!closed_ && !MayFilesBegin()) {
    if (absl::Status status = WaitForTurn(limits); !status.ok()) return status;
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
  changed_.WakeAll();
}

}  // namespace headwater::heads
