#include "server/heads/head.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "server/heads/compute_locks.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {

using observability::MonotonicNow;

absl::StatusOr<std::shared_ptr<Head>> Head::Create(const HeadName& name, const HeadSpec& spec, LossEngine& engine,
                                                   const HeadLimits& limits) {
  absl::StatusOr<std::unique_ptr<EngineHead>> engine_head = engine.CreateHead(spec);
  if (!engine_head.ok()) return engine_head.status();
  return std::shared_ptr<Head>(new Head(name, spec, limits, engine, *std::move(engine_head)));
}

Head::Head(const HeadName& name, const HeadSpec& spec, const HeadLimits& limits, LossEngine& engine,
           std::unique_ptr<EngineHead> engine_head)
    : name_(name),
      spec_(spec),
      limits_(limits),
      create_time_(absl::Now()),
      engine_(engine),
      last_use_nanos_(absl::ToUnixNanos(create_time_)),
      gate_(name),
      engine_head_(std::move(engine_head)),
      tensors_(name_, spec_, engine_, *engine_head_),
      steps_(name_, spec_, limits_),
      weights_(spec.has_bias),
      epoch_(NewEpoch()) {}

Head::~Head() {
  absl::MutexLock state_lock(&state_mutex_);
  steps_.DropAll();
}

// ---- what every call begins with -------------------------------------------------------------------------------------

absl::Status Head::EpochError(const Epoch& epoch) const {
  ErrorMetadata metadata = {{"expected", EpochToHex(epoch_)}, {"actual", EpochToHex(epoch)}, {"headEpoch", EpochToHex(epoch_)}};
  if (spec_.trainable) {
    metadata["openStep"] = absl::StrCat(steps_.open().step);
    metadata["checkpoints"] = steps_.ledger().checkpoints();
  }
  return MakeError(
      ErrorReason::kEpochFenced,
      absl::StrCat("another run owns ", name_.ToString(),
                   " now: since this client opened the head, it was taken over, restored or created anew, or its weights were set. "
                   "Stop, or open the head again, take it, and start the step over"),
      std::move(metadata));
}

absl::Status Head::LostError() const {
  const std::string& checkpoints = steps_.ledger().checkpoints();
  ErrorMetadata metadata = {{"head", name_.ToString()},
                            {"headEpoch", EpochToHex(epoch_)},
                            {"openStep", absl::StrCat(steps_.open().step)},
                            {"checkpoints", checkpoints}};
  if (state_ == HeadState::kLost) {
    return MakeError(ErrorReason::kStepLost,
                     absl::StrCat(name_.ToString(), " is lost since the engine failed (", lost_cause_,
                                  "); restore a checkpoint or set its weights again"),
                     std::move(metadata));
  }
  metadata["restoredStep"] = absl::StrCat(steps_.open().step);
  metadata["checkpoint"] = restored_checkpoint_;
  return MakeError(
      ErrorReason::kStepLost,
      absl::StrCat("the server has been started again: ", name_.ToString(), " came back at step ", steps_.open().step,
                   " from checkpoint ", restored_checkpoint_,
                   "; take the head to go on from there, or restore one of its checkpoints, with their steps ", checkpoints),
      std::move(metadata));
}

absl::Status Head::Check(const Epoch* epoch, Need need, bool for_step) const {
  steps_.Settle();
  if (retired_) return HeadDeleted(name_);
  if (for_step && !spec_.trainable) {
    return MakeError(ErrorReason::kHeadNotTrainable, absl::StrCat(name_.ToString(), " is frozen: it has no steps"),
                     {{"head", name_.ToString()}});
  }
  if (state_ == HeadState::kRestored && epoch != nullptr && (need != Need::kAnyState || *epoch != epoch_)) return LostError();
  if (epoch != nullptr && *epoch != epoch_) return EpochError(*epoch);
  if (need != Need::kAnyState && state_ == HeadState::kLost) return LostError();
  if (need == Need::kReady && state_ == HeadState::kLoading) {
    const char* missing = weights_.has_weight() ? "bias" : "weight";
    return MakeError(ErrorReason::kWeightsNotLoaded, absl::StrCat(name_.ToString(), " has no ", missing, " yet"),
                     {{"head", name_.ToString()}, {"missing", missing}});
  }
  return absl::OkStatus();
}

absl::Status Head::LockAndCheck(const Epoch* epoch, Need need, bool for_step) const {
  absl::MutexLock state_lock(&state_mutex_);
  return Check(epoch, need, for_step);
}

absl::Status Head::CheckOpenStep(const StepKey& key) const {
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
  if (absl::Status status = steps_.ledger().CheckStep(key.step); !status.ok()) return status;
  return steps_.CheckNothingWaits();
}

absl::Status Head::CheckEpoch(const Epoch& epoch) const { return LockAndCheck(&epoch, Need::kAnyState, false); }

absl::Status Head::CheckThere() const { return LockAndCheck(nullptr, Need::kAnyState, false); }

std::vector<HeadGate*> Head::GatesOf(const std::set<Head*, std::less<>>& heads) {
  std::vector<HeadGate*> gates;
  for (Head* head : heads) gates.push_back(&head->gate_);
  return gates;
}

HeadInfo Head::Describe() const {
  absl::MutexLock state_lock(&state_mutex_);
  return DescribeLocked();
}

HeadInfo Head::DescribeLocked() const {
  HeadInfo info;
  info.name = name_;
  info.spec = spec_;
  info.shards.assign(engine_head_->shards().begin(), engine_head_->shards().end());
  info.plan = engine_head_->plan();
  info.create_time = create_time_;
  info.epoch = epoch_;
  info.recovers_epochs = recovers_epochs_;
  info.state = state_;
  info.weight_version = weights_.version();
  if (spec_.trainable) info.open_step = steps_.open().step;
  info.waiting_count = steps_.waiting_count();
  if (spec_.trainable) info.unsaved_since = weights_.unsaved_since();
  info.weight_checksum = weights_.checksum();
  info.restore_note = restore_note_;
  if (state_ == HeadState::kRestored) info.restored_checkpoint = restored_checkpoint_;
  return info;
}

void Head::Touch(absl::Time now) { last_use_nanos_.store(absl::ToUnixNanos(now), std::memory_order_relaxed); }

absl::Time Head::last_use() const { return absl::FromUnixNanos(last_use_nanos_.load(std::memory_order_relaxed)); }

absl::Status Head::AwaitStep(const StepKey& key, const WaitLimits& limits) {
  absl::MutexLock state_lock(&state_mutex_);
  while (!retired_ && state_ == HeadState::kReady && key.epoch == epoch_ && key.step > 0 && key.step - 1 == steps_.open().step) {
    absl::Status waited = Wait(opened_, state_mutex_, limits.ForStep(), "waited for its step");
    if (HasReason(waited, ErrorReason::kDeadlineExceeded) && MonotonicNow() < limits.deadline) break;
    if (!waited.ok()) return waited;
  }
  return absl::OkStatus();
}

// ---- loss of the head, its taking over, and its end ------------------------------------------------------------------

absl::Status Head::AfterChange(const absl::Status& status) {
  if (IsEngineFailure(status)) MarkLost(status);
  return status;
}

void Head::MarkLost(const absl::Status& cause) {
  absl::MutexLock state_lock(&state_mutex_);
  steps_.Reset(steps_.open().step);
  weights_.Forget();
  state_ = HeadState::kLost;
  lost_cause_ = std::string(cause.message());
  opened_.WakeAll();
  changed_.WakeAll();
}

void Head::StartAfresh(int64_t step) {
  steps_.Reset(step);
  weights_.EndStep();
  epoch_ = NewEpoch();
  recovers_epochs_.clear();
  state_ = HeadState::kReady;
  lost_cause_.clear();
  restored_checkpoint_.clear();
  opened_.WakeAll();
  changed_.WakeAll();
}

absl::StatusOr<HeadInfo> Head::Take(const std::optional<Epoch>& epoch, std::vector<Epoch> recovers_epochs,
                                    const WaitLimits& limits) {
  const HeadGate::Entry entry(gate_, limits);
  if (!entry.status().ok()) return entry.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(nullptr, Need::kNotLost, true); !status.ok()) return status;
    if (epoch.has_value() && *epoch != epoch_) return EpochError(*epoch);
  }
  if (absl::Status status = AfterChange(engine_head_->ZeroGradient()); !status.ok()) return status;
  absl::MutexLock state_lock(&state_mutex_);
  StartAfresh(steps_.open().step);
  recovers_epochs_ = std::move(recovers_epochs);
  if (!weights_.HasAllTensors()) state_ = HeadState::kLoading;
  return DescribeLocked();
}

bool Head::InUseLocked() const {
  steps_.Settle();
  return running_calls_ > 0 || use_count_ > 0 || steps_.HasContributions();
}

bool Head::InUse() const {
  absl::MutexLock state_lock(&state_mutex_);
  return InUseLocked();
}

bool Head::HasUses() const {
  absl::MutexLock state_lock(&state_mutex_);
  return use_count_ > 0;
}

void Head::CountUse(int64_t change) {
  absl::MutexLock state_lock(&state_mutex_);
  use_count_ += change;
}

void Head::MarkRetired() {
  retired_ = true;
  gate_.Close();
  opened_.WakeAll();
  changed_.WakeAll();
}

void Head::Retire() {
  {
    absl::MutexLock state_lock(&state_mutex_);
    MarkRetired();
  }
  // Whoever computes now finishes first; whoever waits finds the head retired.
  absl::MutexLock compute_lock(&compute_mutex_);
  absl::MutexLock state_lock(&state_mutex_);
  steps_.DropAll();
  weights_.EndStep();
}

absl::Status Head::TryRetire(const std::optional<Epoch>& epoch, bool force) {
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = Check(epoch.has_value() ? &*epoch : nullptr, Need::kAnyState, false); !status.ok()) return status;
  if (!force && InUseLocked()) {
    const StepTotals totals = steps_.open().Totals();
    const int64_t running_calls = std::max(running_calls_, use_count_);  // who submits for a client has a use of it as well
    return MakeError(ErrorReason::kHeadInUse,
                     absl::StrCat(name_.ToString(), " is in use: ", running_calls, " running calls, ", totals.micro_batch_count,
                                  " committed micro-batches in step ", steps_.open().step, "; force deletes it nevertheless"),
                     {{"head", name_.ToString()},
                      {"openStep", absl::StrCat(steps_.open().step)},
                      {"runningCalls", absl::StrCat(running_calls)},
                      {"committed", absl::StrCat(totals.micro_batch_count)}});
  }
  MarkRetired();
  return absl::OkStatus();
}

// ---- who uses it -----------------------------------------------------------------------------------------------------

HeadUse::HeadUse(std::shared_ptr<Head> head) : head_(std::move(head)) {
  if (head_ != nullptr) head_->CountUse(1);
}

HeadUse& HeadUse::operator=(HeadUse&& other) noexcept {
  if (this == &other) return *this;
  End();
  head_ = std::move(other.head_);
  return *this;
}

HeadUse::~HeadUse() { End(); }

void HeadUse::End() {
  if (head_ == nullptr) return;
  head_->CountUse(-1);
  head_.reset();
}

}  // namespace headwater::heads
