#include "server/heads/head.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/head_core.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {

absl::StatusOr<std::shared_ptr<Head>> Head::Create(const HeadName& name, const HeadSpec& spec, LossEngine& engine,
                                                   const HeadLimits& limits, std::shared_ptr<scheduler::Sequencer> sequencer) {
  absl::StatusOr<std::unique_ptr<EngineHead>> on_engine = engine.CreateHead(spec);
  if (!on_engine.ok()) return on_engine.status();
  return std::shared_ptr<Head>(
      new Head(std::make_unique<HeadCore>(name, spec, limits, engine, std::move(sequencer), *std::move(on_engine))));
}

Head::Head(std::unique_ptr<HeadCore> core) : core_(std::move(core)), last_use_nanos_(absl::ToUnixNanos(core_->create_time)) {}

Head::~Head() {
  const Turn turn(core_->sequencer);
  core_->steps.DropAll();
}

const HeadName& Head::name() const { return core_->name; }

const HeadSpec& Head::spec() const { return core_->spec; }

int64_t Head::token_chunk_rows() const { return core_->on_engine->plan().token_chunk_rows; }

HeadInfo Head::Describe() const {
  const Turn turn(core_->sequencer);
  return core_->Describe();
}

absl::Status Head::CheckEpoch(const std::optional<Epoch>& epoch) const {
  const Turn turn(core_->sequencer);
  return core_->Check(epoch.has_value() ? &*epoch : nullptr, Need::kAnyState, false);
}

// ---- waits -----------------------------------------------------------------------------------------------------------

namespace {

// The status after a wait: OK if only the step's deadline has passed, so that the call itself may follow.
absl::Status AfterWait(const absl::Status& status, const WaitLimits& limits) {
  const bool is_late = HasReason(status, ErrorReason::kDeadlineExceeded);
  return is_late && observability::MonotonicNow() < limits.deadline ? absl::OkStatus() : status;
}

}  // namespace

absl::Status Head::AwaitStep(const StepKey& key, const WaitLimits& limits) {
  HeadCore& core = *core_;
  const Turn turn(core.sequencer);
  while (!core.retired && core.state == HeadState::kReady && key.epoch == core.epoch && key.step > 0 &&
         key.step - 1 == core.steps.open().step) {
    absl::Status status = Wait(core.step_changed, core.sequencer.mutex(), limits.ForStep(), "waited for its step");
    if (!status.ok()) return AfterWait(status, limits);
  }
  return absl::OkStatus();
}

absl::Status Head::AwaitTurn(const StepKey& key, int64_t micro_batch, const WaitLimits& limits) const {
  HeadCore& core = *core_;
  const Turn turn(core.sequencer);
  while (!core.IsItsTurn(key, micro_batch)) {
    absl::Status status = Wait(*core.micro_batch_changed, core.sequencer.mutex(), limits.ForStep(), "waited for its turn");
    if (!status.ok()) return AfterWait(status, limits);
  }
  return absl::OkStatus();
}

// ---- its taking over, and its end ------------------------------------------------------------------------------------

absl::StatusOr<HeadInfo> Head::Take(const std::optional<Epoch>& epoch, std::vector<Epoch> recovers_epochs,
                                    const WaitLimits& limits) {
  HeadCore& core = *core_;
  const absl::StatusOr<scheduler::Admission> admission = core.Admit(kChangesGradient, limits);
  if (!admission.ok()) return admission.status();
  {
    const Turn turn(core.sequencer);
    if (absl::Status status = core.Check(nullptr, Need::kNotLost, true); !status.ok()) return status;
    if (epoch.has_value() && *epoch != core.epoch) return core.EpochError(*epoch);
  }
  if (absl::Status status = core.AfterChange(core.on_engine->ZeroGradient()); !status.ok()) return status;
  const Turn turn(core.sequencer);
  core.StartAfresh(core.steps.open().step);
  core.recovers_epochs = std::move(recovers_epochs);
  if (!core.weights.HasAllTensors()) core.state = HeadState::kLoading;
  return core.Describe();
}

bool Head::InUse() const {
  const Turn turn(core_->sequencer);
  return core_->InUse();
}

int64_t Head::CountUses(int64_t change) const {
  const Turn turn(core_->sequencer);
  return core_->use_count += change;
}

void Head::Retire() {
  HeadCore& core = *core_;
  {
    const Turn turn(core.sequencer);
    core.MarkRetired();
  }
  // The calls that use it finish first; those that wait find it retired.
  const auto needs = [&core] { return scheduler::Needs{{core.record, kWritesWeights}}; };
  const auto admission = core.sequencer.Acquire(needs, AsLongAsItTakes(), kWaitsForHead);
  const Turn turn(core.sequencer);
  core.steps.DropAll();
  core.weights.EndStep();
}

absl::Status Head::TryRetire(const std::optional<Epoch>& epoch, bool force) {
  HeadCore& core = *core_;
  const Turn turn(core.sequencer);
  if (absl::Status status = CheckEpoch(epoch); !status.ok()) return status;
  if (!force && core.InUse()) {
    const StepTotals totals = core.steps.open().Totals();
    // A client's submission has a HeadUse as well, so the two counts overlap.
    const int64_t running_calls = std::max(core.running_calls, core.use_count);
    return MakeError(ErrorReason::kHeadInUse,
                     absl::StrCat(core.name.ToString(), " is in use: ", running_calls, " running calls, ", totals.micro_batch_count,
                                  " committed micro-batches in step ", core.steps.open().step, "; force deletes it nevertheless"),
                     {{"head", core.name.ToString()},
                      {"openStep", absl::StrCat(core.steps.open().step)},
                      {"runningCalls", absl::StrCat(running_calls)},
                      {"committed", absl::StrCat(totals.micro_batch_count)}});
  }
  core.MarkRetired();
  return absl::OkStatus();
}

// ---- who uses it -----------------------------------------------------------------------------------------------------

HeadUse::HeadUse(std::shared_ptr<Head> head) : head_(std::move(head)) {
  if (head_ != nullptr) head_->CountUses(1);
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
  head_->CountUses(-1);
  head_.reset();
}

}  // namespace headwater::heads
