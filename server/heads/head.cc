#include "server/heads/head.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/return_if_error.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {

absl::StatusOr<std::shared_ptr<Head>> Head::Create(const HeadName& name, const HeadSpec& spec, LossEngine& engine,
                                                   const HeadLimits& limits, std::shared_ptr<scheduler::Sequencer> sequencer) {
  HEADWATER_ASSIGN_OR_RETURN(std::unique_ptr<EngineHead> on_engine, engine.CreateHead(spec));
  return std::shared_ptr<Head>(new Head(name, spec, limits, engine, std::move(sequencer), std::move(on_engine)));
}

HeadCore::HeadCore(const HeadName& name, const HeadSpec& spec, const HeadLimits& head_limits, LossEngine& head_engine,
                   std::shared_ptr<scheduler::Sequencer> head_sequencer, std::unique_ptr<EngineHead> head_on_engine)
    : deterministic(head_limits.deterministic),
      engine(head_engine),
      sequencer_owner(std::move(head_sequencer)),
      on_engine(std::move(head_on_engine)),
      tensors(name_, spec_, engine, *on_engine),
      steps(name_, spec, head_limits),
      weights(spec.has_bias),
      name_(name),
      spec_(spec) {}

Head::~Head() {
  const Turn turn(sequencer);
  steps.DropAll();
}

HeadInfo Head::Describe() const {
  const Turn turn(sequencer);
  HeadInfo info;
  info.name = name_;
  info.spec = spec_;
  info.shards.assign(on_engine->shards().begin(), on_engine->shards().end());
  info.plan = on_engine->plan();
  info.create_time = create_time_;
  info.epoch = current_epoch;
  info.recovers_epochs = recovers_epochs;
  info.state = state;
  info.weight_version = weights.version();
  if (spec_.trainable) info.open_step = steps.open().step;
  info.waiting_count = steps.waiting_count();
  if (spec_.trainable) info.unsaved_since = weights.unsaved_since();
  info.weight_checksum = weights.checksum();
  info.restore_note = restore_note_;
  if (state == HeadState::kRestored) info.restored_checkpoint = state_cause;
  return info;
}

// ---- what every call begins with -------------------------------------------------------------------------------------

absl::Status HeadCore::EpochError(const Epoch& named) const {
  ErrorMetadata metadata = {
      {"expected", EpochToHex(current_epoch)}, {"actual", EpochToHex(named)}, {"headEpoch", EpochToHex(current_epoch)}};
  if (spec_.trainable) {
    metadata["openStep"] = absl::StrCat(steps.open().step);
    metadata["checkpoints"] = steps.ledger().checkpoints();
  }
  return MakeError(
      ErrorReason::kEpochFenced,
      absl::StrCat("another run owns ", name_.ToString(),
                   " now: since this client opened the head, it was taken over, restored or created anew, or its weights were set. "
                   "Stop, or open the head again, take it, and start the step over"),
      std::move(metadata));
}

absl::Status HeadCore::LostError() const {
  const std::string& checkpoints = steps.ledger().checkpoints();
  ErrorMetadata metadata = {{"head", name_.ToString()},
                            {"headEpoch", EpochToHex(current_epoch)},
                            {"openStep", absl::StrCat(steps.open().step)},
                            {"checkpoints", checkpoints}};
  if (state == HeadState::kLost) {
    return MakeError(ErrorReason::kStepLost,
                     absl::StrCat(name_.ToString(), " is lost since the engine failed (", state_cause,
                                  "); restore a checkpoint or set its weights again"),
                     std::move(metadata));
  }
  metadata["restoredStep"] = absl::StrCat(steps.open().step);
  metadata["checkpoint"] = state_cause;
  return MakeError(
      ErrorReason::kStepLost,
      absl::StrCat("the server has been started again: ", name_.ToString(), " came back at step ", steps.open().step,
                   " from checkpoint ", state_cause,
                   "; take the head to go on from there, or restore one of its checkpoints, with their steps ", checkpoints),
      std::move(metadata));
}

absl::Status HeadCore::DeletedError() const {
  return MakeError(ErrorReason::kHeadNotFound, absl::StrCat("there is no head ", name_.ToString(), "; it has been deleted"),
                   {{"head", name_.ToString()}});
}

absl::Status HeadCore::StepConflict(int64_t step, const char* what) const {
  const int64_t open_step = steps.open().step;
  return MakeError(ErrorReason::kStepConflict,
                   absl::StrCat("step ", step, " was closed by ", what, "; the open step is ", open_step),
                   {{"step", absl::StrCat(step)}, {"openStep", absl::StrCat(open_step)}});
}

absl::Status HeadCore::Check(const std::optional<Epoch>& expected, Need need, bool for_step) const {
  const Turn turn(sequencer);
  steps.Settle();
  if (retired) return DeletedError();
  if (for_step && !spec_.trainable) {
    return MakeError(ErrorReason::kHeadNotTrainable, absl::StrCat(name_.ToString(), " is frozen: it has no steps"),
                     {{"head", name_.ToString()}});
  }
  const bool is_stale = expected.has_value() && *expected != current_epoch;
  if (state == HeadState::kRestored && expected.has_value() && (need != Need::kAnyState || is_stale)) return LostError();
  if (is_stale) return EpochError(*expected);
  if (need != Need::kAnyState && state == HeadState::kLost) return LostError();
  if (need == Need::kReady && state == HeadState::kLoading) {
    const char* missing = weights.has_weight() ? "bias" : "weight";
    return MakeError(ErrorReason::kWeightsNotLoaded, absl::StrCat(name_.ToString(), " has no ", missing, " yet"),
                     {{"head", name_.ToString()}, {"missing", missing}});
  }
  return absl::OkStatus();
}

absl::Status HeadCore::CheckVersion(const std::optional<int64_t>& expected, const char* field) const {
  const int64_t actual = weights.version();
  if (!expected.has_value() || *expected == actual) return absl::OkStatus();
  ErrorMetadata metadata = {{"expected", absl::StrCat(*expected)}, {"actual", absl::StrCat(actual)}};
  if (field != nullptr) metadata["field"] = field;
  return MakeError(ErrorReason::kWeightVersionMismatch,
                   absl::StrCat("the call expects version ", *expected, " of the weights of ", name_.ToString(),
                                ", they are of version ", actual),
                   std::move(metadata));
}

absl::Status Head::CheckEpoch(const std::optional<Epoch>& epoch) const { return Check(epoch, Need::kAnyState, false); }

// ---- admission and waits ---------------------------------------------------------------------------------------------

void HeadCore::AddNeed(const scheduler::Uses& uses, scheduler::Needs& needs) const {
  if (std::none_of(needs.begin(), needs.end(), [this](const auto& need) { return need.record == record; })) {
    needs.push_back({record, uses});
  }
}

absl::StatusOr<scheduler::Admission> HeadCore::Admit(scheduler::Uses uses, const WaitLimits& wait) const {
  const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
    if (retired) return DeletedError();
    return scheduler::Needs{{record, uses}};
  };
  return sequencer.Acquire(needs, wait, kWaitsForHead);
}

namespace {

// The status after a wait: OK if only the step's deadline has passed, so that the call itself may follow.
absl::Status AfterWait(const absl::Status& status, const WaitLimits& limits) {
  const bool is_late = HasReason(status, ErrorReason::kDeadlineExceeded);
  return is_late && observability::MonotonicNow() < limits.deadline ? absl::OkStatus() : status;
}

}  // namespace

absl::Status Head::AwaitStep(const StepKey& key, const WaitLimits& limits) {
  const Turn turn(sequencer);
  while (!retired && state == HeadState::kReady && key.epoch == current_epoch && key.step > 0 &&
         key.step - 1 == steps.open().step) {
    absl::Status status = Wait(step_changed, sequencer.mutex(), limits.ForStep(), "waited for its step");
    if (!status.ok()) return AfterWait(status, limits);
  }
  return absl::OkStatus();
}

absl::Status Head::AwaitTurn(const StepKey& key, int64_t micro_batch, const WaitLimits& limits) const {
  const Turn turn(sequencer);
  while (!IsItsTurn(key, micro_batch)) {
    absl::Status status = Wait(*micro_batch_changed, sequencer.mutex(), limits.ForStep(), "waited for its turn");
    if (!status.ok()) return AfterWait(status, limits);
  }
  return absl::OkStatus();
}

bool HeadCore::IsItsTurn(const StepKey& key, int64_t micro_batch) const {
  // Only a missing predecessor is waited for; the call itself reports anything else.
  if (!steps.in_order() || retired || state != HeadState::kReady || key.epoch != current_epoch || key.step != steps.open().step)
    return true;
  return steps.IsDue(micro_batch);
}

std::shared_ptr<const WaitingAddition> HeadCore::NextInOrder() const {
  if (!steps.in_order()) return nullptr;  // nothing waits in a head that is not READY
  return steps.window()->Next(steps.open().state == StepState::kSealed);
}

// ---- changes ---------------------------------------------------------------------------------------------------------

void HeadCore::StepChanged() {
  MicroBatchChanged();
  step_changed.WakeAll();
}

absl::Status HeadCore::CloseStep(int64_t step, StepState how) {
  HEADWATER_RETURN_IF_ERROR(steps.Close(step, how));
  weights.EndStep(how == StepState::kReplaced);
  StepChanged();
  return absl::OkStatus();
}

absl::Status HeadCore::AfterChange(const absl::Status& status) {
  if (IsEngineFailure(status)) MarkLost(status);
  return status;
}

void HeadCore::MarkLost(const absl::Status& cause) {
  const Turn turn(sequencer);
  steps.Reset(steps.open().step);
  weights.Forget();
  state = HeadState::kLost;
  state_cause = std::string(cause.message());
  StepChanged();
}

void HeadCore::StartAfresh(int64_t step) {
  steps.Reset(step);
  weights.EndStep(/*replaced=*/false);
  current_epoch = NewEpoch();
  recovers_epochs.clear();
  state = HeadState::kReady;
  state_cause.clear();
  StepChanged();
}

// ---- its taking over, and its end ------------------------------------------------------------------------------------

absl::StatusOr<HeadInfo> Head::Take(const std::optional<Epoch>& epoch, std::vector<Epoch> recovered, const WaitLimits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kChangesGradient, limits));
  {
    const Turn turn(sequencer);
    HEADWATER_RETURN_IF_ERROR(Check(std::nullopt, Need::kNotLost, true));
    if (epoch.has_value() && *epoch != current_epoch) return EpochError(*epoch);
  }
  HEADWATER_RETURN_IF_ERROR(AfterChange(on_engine->ZeroGradient()));
  const Turn turn(sequencer);
  StartAfresh(steps.open().step);
  recovers_epochs = std::move(recovered);
  if (!weights.HasAllTensors()) state = HeadState::kLoading;
  return Describe();
}

bool Head::InUse() const {
  const Turn turn(sequencer);
  steps.Settle();
  return running_calls > 0 || use_count_ > 0 || steps.HasContributions();
}

int64_t Head::CountUses(int64_t change) {
  const Turn turn(sequencer);
  return use_count_ += change;
}

void Head::MarkRetired() {
  retired = true;
  StepChanged();
  scheduler::Sequencer::Reconsider(*record);
}

void Head::Retire() {
  {
    const Turn turn(sequencer);
    MarkRetired();
  }
  // The calls that use it finish first; those that wait find it retired.
  const auto needs = [this] { return scheduler::Needs{{record, kWritesWeights}}; };
  const auto admission = sequencer.Acquire(needs, AsLongAsItTakes(), kWaitsForHead);
  const Turn turn(sequencer);
  steps.DropAll();
  weights.EndStep(/*replaced=*/false);
}

absl::Status Head::TryRetire(const std::optional<Epoch>& epoch, bool force) {
  const Turn turn(sequencer);
  HEADWATER_RETURN_IF_ERROR(CheckEpoch(epoch));
  if (!force && InUse()) {
    const StepTotals totals = steps.open().Totals();
    // A client's submission has a HeadUse as well, so the two counts overlap.
    const int64_t calls = std::max(running_calls, use_count_);
    return MakeError(ErrorReason::kHeadInUse,
                     absl::StrCat(name_.ToString(), " is in use: ", calls, " running calls, ", totals.micro_batch_count,
                                  " committed micro-batches in step ", steps.open().step, "; force deletes it nevertheless"),
                     {{"head", name_.ToString()},
                      {"openStep", absl::StrCat(steps.open().step)},
                      {"runningCalls", absl::StrCat(calls)},
                      {"committed", absl::StrCat(totals.micro_batch_count)}});
  }
  MarkRetired();
  return absl::OkStatus();
}

HeadUse::HeadUse(std::shared_ptr<Head> head) : head_(std::move(head)) {
  head_->CountUses(1);
  ends_ = std::shared_ptr<const void>(nullptr, [used = head_](std::nullptr_t) { used->CountUses(-1); });
}

}  // namespace headwater::heads
