// Head's steps: sealed, applied, discarded; their gradient read.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/apply_arguments.h"
#include "server/heads/compute_locks.h"
#include "server/heads/head.h"

namespace headwater::heads {
namespace {

// PyTorch's clip_grad_norm_ adds this to the norm.
constexpr double kClipEpsilon = 1e-6;

}  // namespace

absl::StatusOr<std::pair<StepRecord, std::optional<StepRecord>>> Head::GetSteps(const Epoch& epoch) const {
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = Check(&epoch, Need::kNotLost, true); !status.ok()) return status;
  return std::make_pair(steps_.open(), steps_.ledger().last_closed());
}

bool Head::TakesMicroBatches(const StepKey& key) const {
  absl::MutexLock state_lock(&state_mutex_);
  return !retired_ && state_ == HeadState::kReady && key.epoch == epoch_ && key.step == steps_.open().step &&
         steps_.open().state == StepState::kOpen;
}

absl::Status Head::AwaitMicroBatches(const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& limits) const {
  absl::MutexLock state_lock(&state_mutex_);
  while (true) {
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    const absl::Status complete = steps_.ledger().CheckSeal(key.step, expected);
    const bool lacks_some =
        HasReason(complete, ErrorReason::kMicroBatchMissing) || HasReason(complete, ErrorReason::kMicroBatchUncommitted);
    // To a sealed step, by another expectation perhaps, nothing can come any more.
    if (!lacks_some || steps_.open().state != StepState::kOpen) return absl::OkStatus();
    absl::Status waited = Wait(changed_, state_mutex_, limits, "waited for micro-batches of its step");
    if (HasReason(waited, ErrorReason::kDeadlineExceeded)) return absl::OkStatus();
    if (!waited.ok()) return waited;
  }
}

absl::StatusOr<SealReply> Head::Seal(const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& wait,
                                     const WaitLimits& limits) {
  if (absl::Status status = AwaitMicroBatches(key, expected, wait); !status.ok()) return status;
  std::optional<bool> sealed_first;
  while (true) {
    {
      const HeadGate::Entry entry(gate_, limits);
      if (!entry.status().ok()) return entry.status();
      absl::MutexLock compute_lock(&compute_mutex_);
      if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
      SealReply reply;
      bool waits = false;
      {
        absl::MutexLock state_lock(&state_mutex_);
        if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
        absl::StatusOr<bool> sealed_now = steps_.ledger().Seal(key.step, expected);
        if (!sealed_now.ok()) return sealed_now.status();
        if (!sealed_first.has_value()) sealed_first = *sealed_now;
        reply.replayed = !*sealed_first;
        reply.totals = steps_.open().Totals();
        waits = steps_.waiting_count() > 0;
        changed_.WakeAll();
      }
      // If this, or what follows, fails the step is sealed nevertheless, and the same call again tells the rest.
      if (!waits) {
        absl::StatusOr<GradientStats> stats = engine_head_->ComputeGradientStats();
        if (!stats.ok()) return stats.status();
        reply.stats = *stats;
        return reply;
      }
    }
    if (absl::Status status = AddInOrder(limits); !status.ok()) return status;
  }
}

absl::StatusOr<ApplyReply> Head::Apply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                       const ApplyArguments& arguments, const WaitLimits& limits) {
  while (true) {
    absl::StatusOr<std::optional<ApplyReply>> reply = TryApply(key, expected, arguments, limits);
    if (!reply.ok()) return reply.status();
    if (reply->has_value()) return **std::move(reply);
    if (absl::Status status = AddInOrder(limits); !status.ok()) return status;
  }
}

absl::StatusOr<std::optional<ApplyReply>> Head::TryApply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                                         const ApplyArguments& arguments, const WaitLimits& limits) {
  const HeadGate::Entry entry(gate_, limits);
  if (!entry.status().ok()) return entry.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  ApplyReply reply;
  OptimizerStep step;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    if (absl::Status status = CheckApply(name_, spec_, arguments); !status.ok()) return status;
    const std::optional<StepRecord>& last_closed = steps_.ledger().last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      const std::optional<AppliedStep>& applied = steps_.last_apply();
      const bool same = last_closed->state == StepState::kApplied && applied.has_value() && applied->arguments == arguments &&
                        (!expected.has_value() || !applied->expected.has_value() || *expected == *applied->expected);
      if (same) {
        reply = applied->reply;
        reply.replayed = true;
        return reply;
      }
      return MakeError(ErrorReason::kStepConflict,
                       absl::StrCat("step ", key.step, " was closed by ",
                                    last_closed->state == StepState::kApplied ? "an update with other arguments" : "another call",
                                    "; the open step is ", steps_.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(steps_.open().step)}});
    }
    if (expected.has_value()) {
      if (absl::StatusOr<bool> sealed = steps_.ledger().Seal(key.step, *expected); !sealed.ok()) return sealed.status();
    } else if (absl::Status status = steps_.ledger().CheckStep(key.step); !status.ok()) {
      return status;
    } else if (steps_.open().state == StepState::kOpen) {
      return MakeError(
          ErrorReason::kMissingField,
          absl::StrCat("expected must say which micro-batches step ", key.step, " consists of, because it is still open"),
          {{"field", "expected"}, {"expected", "a count or ids"}, {"actual", "nothing"}, {"step", absl::StrCat(key.step)}});
    }
    if (steps_.waiting_count() > 0) return std::optional<ApplyReply>();
    if (absl::Status status = steps_.ledger().CheckClose(key.step, StepState::kApplied); !status.ok()) return status;
    reply.totals = steps_.open().Totals();
    step.update_count = weights_.update_count() + 1;
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
  if (absl::Status status = CloseStep(key.step, StepState::kApplied); !status.ok()) return status;
  weights_.SetUpdateCount(step.update_count);
  reply.open_step = steps_.open().step;
  reply.weight_version = weights_.NextVersion();
  weights_.SetChecksum("");
  steps_.SetLastApply({arguments, expected, reply});
  return reply;
}

absl::Status Head::CloseStep(int64_t step, StepState how) {
  if (absl::Status status = steps_.Close(step, how); !status.ok()) return status;
  weights_.EndStep();
  opened_.WakeAll();
  changed_.WakeAll();
  return absl::OkStatus();
}

absl::StatusOr<std::pair<int64_t, bool>> Head::DiscardGradient(const StepKey& key, const WaitLimits& limits) {
  const HeadGate::Entry entry(gate_, limits);
  if (!entry.status().ok()) return entry.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    const std::optional<StepRecord>& last_closed = steps_.ledger().last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      if (last_closed->state == StepState::kDiscarded) return std::make_pair(steps_.open().step, true);
      return MakeError(ErrorReason::kStepConflict,
                       absl::StrCat("step ", key.step, " was closed by ",
                                    last_closed->state == StepState::kReplaced ? "new weights" : "an update", "; the open step is ",
                                    steps_.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(steps_.open().step)}});
    }
    if (absl::Status status = steps_.ledger().CheckClose(key.step, StepState::kDiscarded); !status.ok()) return status;
  }
  if (absl::Status status = AfterChange(engine_head_->ZeroGradient()); !status.ok()) return status;
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = CloseStep(key.step, StepState::kDiscarded); !status.ok()) return status;
  return std::make_pair(steps_.open().step, false);
}

absl::StatusOr<GradientStats> Head::GradientNorm(const StepKey& key, const WaitLimits& limits) const {
  const HeadGate::Entry entry(gate_, limits);
  if (!entry.status().ok()) return entry.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  if (absl::Status status = CheckOpenStep(key); !status.ok()) return status;
  return engine_head_->ComputeGradientStats();
}

absl::Status Head::ReadGradient(const StepKey& key, HeadTensor tensor, int64_t element_start, int64_t element_count, float* out,
                                const WaitLimits& limits) const {
  const HeadGate::Entry entry(gate_, limits);
  if (!entry.status().ok()) return entry.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  if (absl::Status status = CheckOpenStep(key); !status.ok()) return status;
  return tensors_.ReadGradient(tensor, element_start, element_count, out);
}

}  // namespace headwater::heads
