// Head in deterministic mode: what may come, what waits, and the additions in ascending id.
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/commit_arguments.h"
#include "server/heads/compute_locks.h"
#include "server/heads/head.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {

using observability::MonotonicNow;

absl::Status Head::AwaitTurn(const StepKey& key, int64_t micro_batch, const WaitLimits& limits) const {
  if (!in_order()) return absl::OkStatus();
  absl::MutexLock state_lock(&state_mutex_);
  while (!IsItsTurn(key, micro_batch)) {
    absl::Status waited = Wait(changed_, state_mutex_, limits.ForStep(), "waited for its turn in the order");
    if (HasReason(waited, ErrorReason::kDeadlineExceeded) && MonotonicNow() < limits.deadline) break;
    if (!waited.ok()) return waited;
  }
  return absl::OkStatus();
}

bool Head::HasItsTurn(const StepKey& key, int64_t micro_batch) const {
  absl::MutexLock state_lock(&state_mutex_);
  return !in_order() || IsItsTurn(key, micro_batch);
}

bool Head::IsItsTurn(const StepKey& key, int64_t micro_batch) const {
  // Anything but a missing predecessor is for the call itself to find out.
  if (retired_ || state_ != HeadState::kReady || key.epoch != epoch_ || key.step != steps_.open().step) return true;
  return steps_.IsDue(micro_batch);
}

// ---- additions -------------------------------------------------------------------------------------------------------

void Head::WaitInOrder(const std::vector<Head*>& heads, int64_t micro_batch, const HeldRows& held,
                       const CommitArguments& arguments) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (Head* head : heads) head->steps_.Wait(micro_batch, held, arguments, *head->engine_head_);
}

std::shared_ptr<const WaitingAddition> Head::NextInOrder() const {
  if (retired_ || state_ != HeadState::kReady) return nullptr;
  return steps_.Next();
}

absl::Status Head::AddInOrder(const WaitLimits& limits) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (!in_order()) return absl::OkStatus();
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
    steps_.MarkAdded(next->micro_batch);
    changed_.WakeAll();
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
