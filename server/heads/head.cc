#include "server/heads/head.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::heads {
namespace {

// PyTorch's clip_grad_norm_ adds this to the norm.
constexpr double kClipEpsilon = 1e-6;

absl::Status RangeError(const char* field, const char* expected, double actual) {
  return MakeError(ErrorReason::kInvalidField, absl::StrCat(field, " must be ", expected, ", it is ", actual),
                   {{"field", field}, {"expected", expected}, {"actual", absl::StrCat(actual)}});
}

absl::Status OverrideError(const char* field, const char* owner) {
  return MakeError(ErrorReason::kInvalidCombination,
                   absl::StrCat(field, " overrides a setting of ", owner, ", which the head has not"),
                   {{"field", field}, {"expected", absl::StrCat("nothing, or a head with ", owner)}, {"actual", "an override"}});
}

bool IsNonNegative(double value) { return std::isfinite(value) && value >= 0; }
bool IsDecayRate(double value) { return value >= 0 && value < 1; }

// The optimizer's settings with a step's overrides.
OptimizerSpec WithOverrides(OptimizerSpec optimizer, const ApplyArguments& arguments) {
  if (AdamWSpec* adamw = std::get_if<AdamWSpec>(&optimizer)) {
    adamw->beta1 = arguments.beta1.value_or(adamw->beta1);
    adamw->beta2 = arguments.beta2.value_or(adamw->beta2);
    adamw->epsilon = arguments.epsilon.value_or(adamw->epsilon);
    adamw->weight_decay = arguments.weight_decay.value_or(adamw->weight_decay);
  } else if (SgdSpec* sgd = std::get_if<SgdSpec>(&optimizer)) {
    sgd->momentum = arguments.momentum.value_or(sgd->momentum);
    sgd->weight_decay = arguments.weight_decay.value_or(sgd->weight_decay);
  }
  return optimizer;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Head>> Head::Create(const HeadName& name, const HeadSpec& spec, LossEngine& engine,
                                                   const HeadLimits& limits) {
  absl::StatusOr<std::unique_ptr<EngineHead>> engine_head = engine.CreateHead(spec);
  if (!engine_head.ok()) return engine_head.status();
  return std::shared_ptr<Head>(new Head(name, spec, limits, *std::move(engine_head)));
}

Head::Head(const HeadName& name, const HeadSpec& spec, const HeadLimits& limits, std::unique_ptr<EngineHead> engine_head)
    : name_(name),
      spec_(spec),
      limits_(limits),
      create_time_(absl::Now()),
      engine_head_(std::move(engine_head)),
      ledger_(spec.initial_step),
      epoch_(NewEpoch()) {}

// ---- what every call begins with -------------------------------------------------------------------------------------

absl::Status Head::EpochError(const Epoch& epoch) const {
  ErrorMetadata metadata = {{"expected", EpochToHex(epoch_)}, {"actual", EpochToHex(epoch)}, {"headEpoch", EpochToHex(epoch_)}};
  if (spec_.trainable) metadata["openStep"] = absl::StrCat(ledger_.open().step);
  return MakeError(
      ErrorReason::kEpochFenced,
      absl::StrCat("the epoch of ", name_.ToString(), " is ", EpochToHex(epoch_), ", the call carries ", EpochToHex(epoch)),
      std::move(metadata));
}

absl::Status Head::Check(const Epoch* epoch, Need need, bool for_step) const {
  if (retired_) {
    return MakeError(ErrorReason::kHeadNotFound, absl::StrCat("there is no head ", name_.ToString(), "; it has been deleted"),
                     {{"head", name_.ToString()}});
  }
  if (for_step && !spec_.trainable) {
    return MakeError(ErrorReason::kHeadNotTrainable, absl::StrCat(name_.ToString(), " is frozen: it has no steps"),
                     {{"head", name_.ToString()}});
  }
  if (epoch != nullptr && *epoch != epoch_) return EpochError(*epoch);
  if (need != Need::kAnyState && state_ == HeadState::kLost) {
    return MakeError(
        ErrorReason::kStepLost,
        absl::StrCat(name_.ToString(), " is lost since the engine failed (", lost_cause_,
                     "); restore a checkpoint or set its weights again"),
        {{"head", name_.ToString()}, {"headEpoch", EpochToHex(epoch_)}, {"openStep", absl::StrCat(ledger_.open().step)}});
  }
  if (need == Need::kReady && state_ == HeadState::kLoading) {
    const char* missing = has_weight_ ? "bias" : "weight";
    return MakeError(ErrorReason::kWeightsNotLoaded, absl::StrCat(name_.ToString(), " has no ", missing, " yet"),
                     {{"head", name_.ToString()}, {"missing", missing}});
  }
  return absl::OkStatus();
}

absl::Status Head::LockAndCheck(const Epoch* epoch, Need need, bool for_step) const {
  absl::MutexLock state_lock(&state_mutex_);
  return Check(epoch, need, for_step);
}

absl::Status Head::CheckEpoch(const Epoch& epoch) const { return LockAndCheck(&epoch, Need::kAnyState, false); }

HeadInfo Head::Describe() const {
  HeadInfo info;
  info.name = name_;
  info.spec = spec_;
  info.shards.assign(engine_head_->shards().begin(), engine_head_->shards().end());
  info.plan = engine_head_->plan();
  info.create_time = create_time_;
  absl::MutexLock state_lock(&state_mutex_);
  info.epoch = epoch_;
  info.state = state_;
  info.weight_version = weight_version_;
  if (spec_.trainable) info.open_step = ledger_.open().step;
  info.weight_checksum = weight_checksum_;
  return info;
}

// ---- loss of the head, and its end -----------------------------------------------------------------------------------

absl::Status Head::AfterChange(const absl::Status& status) {
  if (HasReason(status, ErrorReason::kEngineFailed) || HasReason(status, ErrorReason::kInternal)) MarkLost(status);
  return status;
}

void Head::MarkLost(const absl::Status& cause) {
  staged_.clear();
  absl::MutexLock state_lock(&state_mutex_);
  state_ = HeadState::kLost;
  lost_cause_ = std::string(cause.message());
  has_weight_ = false;
  has_bias_ = false;
  weight_checksum_.clear();
  ledger_.Reset(ledger_.open().step);
  last_apply_.reset();
}

bool Head::InUseLocked() const {
  const StepRecord& open = ledger_.open();
  if (running_calls_ > 0 || open.state == StepState::kSealed || open.HasUndecided()) return true;
  return open.Totals().micro_batch_count > 0;
}

bool Head::InUse() const {
  absl::MutexLock state_lock(&state_mutex_);
  return InUseLocked();
}

void Head::Retire() {
  {
    absl::MutexLock state_lock(&state_mutex_);
    retired_ = true;
  }
  // Whoever computes now finishes first; whoever waits finds the head retired.
  absl::MutexLock compute_lock(&compute_mutex_);
  staged_.clear();
}

absl::Status Head::TryRetire(const std::optional<Epoch>& epoch, bool force) {
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = Check(epoch.has_value() ? &*epoch : nullptr, Need::kAnyState, false); !status.ok()) return status;
  if (!force && InUseLocked()) {
    const StepTotals totals = ledger_.open().Totals();
    return MakeError(ErrorReason::kHeadInUse,
                     absl::StrCat(name_.ToString(), " is in use: ", running_calls_, " running calls, ", totals.micro_batch_count,
                                  " committed micro-batches in step ", ledger_.open().step, "; force deletes it nevertheless"),
                     {{"head", name_.ToString()},
                      {"openStep", absl::StrCat(ledger_.open().step)},
                      {"runningCalls", absl::StrCat(running_calls_)},
                      {"committed", absl::StrCat(totals.micro_batch_count)}});
  }
  retired_ = true;
  return absl::OkStatus();
}

// ---- decisions on micro-batches --------------------------------------------------------------------------------------

absl::StatusOr<bool> Head::Commit(const StepKey& key, int64_t micro_batch, int64_t attempt, double factor) {
  const auto check = [&]() -> absl::StatusOr<bool> {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    return ledger_.CheckCommit(key.step, micro_batch, attempt, factor);
  };
  // Refusals and replays need not wait for a running computation.
  if (absl::StatusOr<bool> decision = check(); !decision.ok() || !*decision) return decision;
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::StatusOr<bool> decision = check(); !decision.ok() || !*decision) return decision;
  const auto contribution = staged_.find(micro_batch);
  if (contribution == staged_.end()) {
    return MakeError(ErrorReason::kInternal, absl::StrCat("the contribution of micro-batch ", micro_batch, " is not there"),
                     {{"microBatch", absl::StrCat(micro_batch)}});
  }
  const absl::Status committed = contribution->second->Commit(factor);
  staged_.erase(contribution);
  if (!committed.ok()) {
    // The interface allows no failure but the engine's: part of the contribution may have been added.
    MarkLost(committed);
    return committed;
  }
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = ledger_.FinishCommit(micro_batch, factor); !status.ok()) return status;
  return true;
}

absl::StatusOr<bool> Head::Discard(const StepKey& key, int64_t micro_batch, int64_t attempt) {
  {
    // One that is being computed is answered at once.
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    if (absl::Status status = ledger_.CheckNotInProgress(key.step, micro_batch); !status.ok()) return status;
  }
  absl::MutexLock compute_lock(&compute_mutex_);
  absl::StatusOr<bool> dropped = false;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    dropped = ledger_.Discard(key.step, micro_batch, attempt, limits_.max_step_micro_batches);
  }
  if (dropped.ok() && *dropped) staged_.erase(micro_batch);
  return dropped;
}

// ---- steps -----------------------------------------------------------------------------------------------------------

absl::StatusOr<std::pair<StepRecord, std::optional<StepRecord>>> Head::GetSteps(const Epoch& epoch) const {
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = Check(&epoch, Need::kNotLost, true); !status.ok()) return status;
  return std::make_pair(ledger_.open(), ledger_.last_closed());
}

absl::StatusOr<SealReply> Head::Seal(const StepKey& key, const ExpectedMicroBatches& expected) {
  absl::MutexLock compute_lock(&compute_mutex_);
  SealReply reply;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    absl::StatusOr<bool> sealed_now = ledger_.Seal(key.step, expected);
    if (!sealed_now.ok()) return sealed_now.status();
    reply.replayed = !*sealed_now;
    reply.totals = ledger_.open().Totals();
  }
  // If this fails the step is sealed nevertheless, and the same call again tells the rest.
  absl::StatusOr<GradientStats> stats = engine_head_->ComputeGradientStats();
  if (!stats.ok()) return stats.status();
  reply.stats = *stats;
  return reply;
}

absl::Status Head::CheckApply(const ApplyArguments& arguments) const {
  const auto& optimizer = spec_.optimizer;
  if (std::holds_alternative<std::monostate>(optimizer)) {
    return MakeError(ErrorReason::kOptimizerNotConfigured, absl::StrCat(name_.ToString(), " was created without an optimizer"),
                     {{"head", name_.ToString()}});
  }
  if (!std::holds_alternative<AdamWSpec>(optimizer)) {
    if (arguments.beta1.has_value()) return OverrideError("beta1", "AdamW");
    if (arguments.beta2.has_value()) return OverrideError("beta2", "AdamW");
    if (arguments.epsilon.has_value()) return OverrideError("epsilon", "AdamW");
  }
  if (arguments.momentum.has_value()) {
    const SgdSpec* sgd = std::get_if<SgdSpec>(&optimizer);
    if (sgd == nullptr || sgd->momentum == 0) return OverrideError("momentum", "SGD with momentum");
    if (!IsDecayRate(*arguments.momentum)) return RangeError("momentum", "in [0, 1)", *arguments.momentum);
    if (sgd->nesterov && *arguments.momentum == 0) return OverrideError("momentum", "SGD without Nesterov's momentum, if it is 0");
  }
  if (!IsNonNegative(arguments.learning_rate)) {
    return RangeError("learning_rate", "finite and at least 0", arguments.learning_rate);
  }
  if (!std::isfinite(arguments.gradient_factor)) return RangeError("gradient_factor", "finite", arguments.gradient_factor);
  if (arguments.max_grad_norm.has_value() && !(*arguments.max_grad_norm > 0)) {
    return RangeError("max_grad_norm", "greater than 0", *arguments.max_grad_norm);
  }
  if (!IsNonNegative(arguments.other_grad_norm_squared)) {
    return RangeError("other_grad_norm_squared", "finite and at least 0", arguments.other_grad_norm_squared);
  }
  if (arguments.weight_decay.has_value() && !IsNonNegative(*arguments.weight_decay)) {
    return RangeError("weight_decay", "finite and at least 0", *arguments.weight_decay);
  }
  if (arguments.beta1.has_value() && !IsDecayRate(*arguments.beta1)) return RangeError("beta1", "in [0, 1)", *arguments.beta1);
  if (arguments.beta2.has_value() && !IsDecayRate(*arguments.beta2)) return RangeError("beta2", "in [0, 1)", *arguments.beta2);
  if (arguments.epsilon.has_value() && !IsNonNegative(*arguments.epsilon)) {
    return RangeError("epsilon", "finite and at least 0", *arguments.epsilon);
  }
  return absl::OkStatus();
}

absl::StatusOr<ApplyReply> Head::Apply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                       const ApplyArguments& arguments) {
  absl::MutexLock compute_lock(&compute_mutex_);
  ApplyReply reply;
  OptimizerStep step;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    if (absl::Status status = CheckApply(arguments); !status.ok()) return status;
    const std::optional<StepRecord>& last_closed = ledger_.last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      const bool same = last_closed->state == StepState::kApplied && last_apply_.has_value() &&
                        last_apply_->arguments == arguments &&
                        (!expected.has_value() || !last_apply_->expected.has_value() || *expected == *last_apply_->expected);
      if (same) {
        reply = last_apply_->reply;
        reply.replayed = true;
        return reply;
      }
      return MakeError(ErrorReason::kStepConflict,
                       absl::StrCat("step ", key.step, " was closed by ",
                                    last_closed->state == StepState::kApplied ? "an update with other arguments" : "another call",
                                    "; the open step is ", ledger_.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(ledger_.open().step)}});
    }
    if (expected.has_value()) {
      if (absl::StatusOr<bool> sealed = ledger_.Seal(key.step, *expected); !sealed.ok()) return sealed.status();
    } else if (absl::Status status = ledger_.CheckStep(key.step); !status.ok()) {
      return status;
    } else if (ledger_.open().state == StepState::kOpen) {
      return MakeError(
          ErrorReason::kMissingField,
          absl::StrCat("expected must say which micro-batches step ", key.step, " consists of, because it is still open"),
          {{"field", "expected"}, {"expected", "a count or ids"}, {"actual", "nothing"}, {"step", absl::StrCat(key.step)}});
    }
    if (absl::Status status = ledger_.CheckClose(key.step, StepState::kApplied); !status.ok()) return status;
    reply.totals = ledger_.open().Totals();
    step.update_count = update_count_ + 1;
  }

  absl::StatusOr<GradientStats> stats = engine_head_->ComputeGradientStats();
  if (!stats.ok()) return stats.status();
  reply.gradient_norm_squared = stats->norm_squared * arguments.gradient_factor * arguments.gradient_factor;
  reply.global_grad_norm = std::sqrt(reply.gradient_norm_squared + arguments.other_grad_norm_squared);
  if (stats->non_finite_count > 0 || !std::isfinite(reply.global_grad_norm)) {
    return MakeError(ErrorReason::kNonFiniteGradient,
                     absl::StrCat("the gradient of step ", key.step, " has ", stats->non_finite_count,
                                  " non-finite elements and the global norm ", reply.global_grad_norm,
                                  "; nothing was changed, discard the gradient to go on"),
                     {{"step", absl::StrCat(key.step)},
                      {"nonFiniteCount", absl::StrCat(stats->non_finite_count)},
                      {"globalGradNorm", absl::StrCat(reply.global_grad_norm)}});
  }
  if (arguments.max_grad_norm.has_value()) {
    reply.clip_factor = std::min(1.0, *arguments.max_grad_norm / (reply.global_grad_norm + kClipEpsilon));
  }
  step.learning_rate = arguments.learning_rate;
  step.gradient_multiplier = arguments.gradient_factor * reply.clip_factor;
  step.settings = WithOverrides(spec_.optimizer, arguments);
  if (absl::Status status = AfterChange(engine_head_->ApplyOptimizer(step)); !status.ok()) return status;

  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = ledger_.Close(key.step, StepState::kApplied); !status.ok()) return status;
  update_count_ = step.update_count;
  reply.open_step = ledger_.open().step;
  reply.weight_version = ++weight_version_;
  weight_checksum_.clear();
  last_apply_ = AppliedStep{arguments, expected, reply};
  return reply;
}

absl::StatusOr<std::pair<int64_t, bool>> Head::DiscardGradient(const StepKey& key) {
  absl::MutexLock compute_lock(&compute_mutex_);
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    const std::optional<StepRecord>& last_closed = ledger_.last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      if (last_closed->state == StepState::kDiscarded) return std::make_pair(ledger_.open().step, true);
      return MakeError(ErrorReason::kStepConflict,
                       absl::StrCat("step ", key.step, " was closed by an update; the open step is ", ledger_.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(ledger_.open().step)}});
    }
    if (absl::Status status = ledger_.CheckClose(key.step, StepState::kDiscarded); !status.ok()) return status;
  }
  staged_.clear();
  if (absl::Status status = AfterChange(engine_head_->ZeroGradient()); !status.ok()) return status;
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = ledger_.Close(key.step, StepState::kDiscarded); !status.ok()) return status;
  last_apply_.reset();
  return std::make_pair(ledger_.open().step, false);
}

absl::Status Head::CheckOpenStep(const StepKey& key) const {
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
  return ledger_.CheckStep(key.step);
}

absl::StatusOr<GradientStats> Head::GradientNorm(const StepKey& key) const {
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckOpenStep(key); !status.ok()) return status;
  return engine_head_->ComputeGradientStats();
}

absl::Status Head::ReadGradient(const StepKey& key, HeadTensor tensor, int64_t element_start, int64_t element_count,
                                float* out) const {
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckOpenStep(key); !status.ok()) return status;
  if (tensor == HeadTensor::kWeight) tensor = HeadTensor::kGradWeight;
  if (tensor == HeadTensor::kBias) tensor = HeadTensor::kGradBias;
  if (tensor != HeadTensor::kGradWeight && tensor != HeadTensor::kGradBias) {
    return MakeError(ErrorReason::kInvalidField,
                     absl::StrCat("tensor must be the gradient of weight or bias, it is ", HeadTensorName(tensor)),
                     {{"field", "tensor"}, {"expected", "grad_weight or grad_bias"}, {"actual", HeadTensorName(tensor)}});
  }
  if (absl::Status status = CheckElements(tensor, element_start, element_count); !status.ok()) return status;
  return engine_head_->ReadTensor(tensor, element_start, element_count, out);
}

}  // namespace headwater::heads
