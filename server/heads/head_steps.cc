// Head's steps: sealed, applied, discarded; their gradient read.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/head.h"
#include "server/heads/head_core.h"
#include "server/heads/steps/apply_arguments.h"

namespace headwater::heads {
namespace {

// PyTorch's clip_grad_norm_ adds this to the norm.
constexpr double kClipEpsilon = 1e-6;

// The checks of a call on the gradient of the open or sealed step.
absl::Status CheckOpenStep(HeadCore& core, const StepKey& key) {
  const Turn turn(core.sequencer);
  if (absl::Status status = core.Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
  if (absl::Status status = core.steps.ledger().CheckStep(key.step); !status.ok()) return status;
  return core.steps.CheckNothingWaits();
}

// Waits while micro-batches that Seal() needs are missing or undecided. OK when there is nothing to wait for, and at the deadline.
absl::Status AwaitMicroBatches(HeadCore& core, const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& limits) {
  const Turn turn(core.sequencer);
  while (true) {
    if (absl::Status status = core.Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    const absl::Status complete = core.steps.ledger().CheckSeal(key.step, expected);
    const bool lacks_some =
        HasReason(complete, ErrorReason::kMicroBatchMissing) || HasReason(complete, ErrorReason::kMicroBatchUncommitted);
    // A sealed step takes nothing more, even if it was sealed with another expectation.
    if (!lacks_some || core.steps.open().state != StepState::kOpen) return absl::OkStatus();
    // A try that waited for the head has kept its place there: those that bring the micro-batches must not stand behind it.
    core.sequencer.GiveUpPlace(limits.waiter);
    const absl::Status waited =
        Wait(*core.micro_batch_changed, core.sequencer.mutex(), limits, "waited for micro-batches of its step");
    if (!waited.ok()) return HasReason(waited, ErrorReason::kDeadlineExceeded) ? absl::OkStatus() : waited;
  }
}

// Null if waiting contributions must be added to the sealed step first.
absl::StatusOr<std::optional<ApplyReply>> TryApply(HeadCore& core, const StepKey& key,
                                                   const std::optional<ExpectedMicroBatches>& expected,
                                                   const ApplyArguments& arguments, const WaitLimits& limits) {
  absl::StatusOr<scheduler::Admission> admission = core.Admit(kWritesWeights, limits);
  if (!admission.ok()) return admission.status();
  ApplyReply reply;
  OptimizerStep step;
  {
    const Turn turn(core.sequencer);
    if (absl::Status status = core.Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    if (absl::Status status = CheckApply(core.name, core.spec, arguments); !status.ok()) return status;
    const std::optional<StepRecord>& last_closed = core.steps.ledger().last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      const std::optional<AppliedStep>& applied = core.steps.last_apply();
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
                                    "; the open step is ", core.steps.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(core.steps.open().step)}});
    }
    if (expected.has_value()) {
      if (absl::StatusOr<bool> sealed = core.steps.ledger().Seal(key.step, *expected); !sealed.ok()) return sealed.status();
    } else if (absl::Status status = core.steps.ledger().CheckStep(key.step); !status.ok()) {
      return status;
    } else if (core.steps.open().state == StepState::kOpen) {
      return MakeError(
          ErrorReason::kMissingField,
          absl::StrCat("expected must say which micro-batches step ", key.step, " consists of, because it is still open"),
          {{"field", "expected"}, {"expected", "a count or ids"}, {"actual", "nothing"}, {"step", absl::StrCat(key.step)}});
    }
    if (core.steps.waiting_count() > 0) return std::optional<ApplyReply>();
    if (absl::Status status = core.steps.ledger().CheckClose(key.step, StepState::kApplied); !status.ok()) return status;
    reply.totals = core.steps.open().Totals();
    step.update_count = core.weights.update_count() + 1;
  }

  absl::StatusOr<GradientStats> stats = core.on_engine->ComputeGradientStats();
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
  step.settings = WithOverrides(core.spec.optimizer, arguments);
  if (absl::Status status = core.AfterChange(core.on_engine->ApplyOptimizer(step)); !status.ok()) return status;

  const Turn turn(core.sequencer);
  if (absl::Status status = core.CloseStep(key.step, StepState::kApplied); !status.ok()) return status;
  core.weights.SetUpdateCount(step.update_count);
  reply.open_step = core.steps.open().step;
  reply.weight_version = core.weights.NextVersion();
  core.weights.SetChecksum("");
  core.steps.last_apply() = {arguments, expected, reply};
  admission->Release();  // in this turn: who waited for the step finds the head free
  return reply;
}

}  // namespace

absl::StatusOr<std::pair<StepRecord, std::optional<StepRecord>>> Head::GetSteps(const Epoch& epoch) const {
  HeadCore& core = *core_;
  const Turn turn(core.sequencer);
  if (absl::Status status = core.Check(&epoch, Need::kNotLost, true); !status.ok()) return status;
  return std::make_pair(core.steps.open(), core.steps.ledger().last_closed());
}

absl::StatusOr<SealReply> Head::Seal(const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& wait,
                                     const WaitLimits& limits) {
  HeadCore& core = *core_;
  if (absl::Status status = AwaitMicroBatches(core, key, expected, wait.ForStep()); !status.ok()) return status;
  std::optional<bool> sealed_first;
  while (true) {
    // Once it has sealed the step this call must not be tried again: it would take itself for a repeat. So this thread waits.
    const WaitLimits here = sealed_first.has_value() ? WaitLimits{limits.deadline} : limits;
    {
      const absl::StatusOr<scheduler::Admission> admission = core.Admit(kChangesGradient, here);
      if (!admission.ok()) return admission.status();
      SealReply reply;
      bool waits = false;
      {
        const Turn turn(core.sequencer);
        if (absl::Status status = core.Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
        absl::StatusOr<bool> sealed_now = core.steps.ledger().Seal(key.step, expected);
        if (!sealed_now.ok()) return sealed_now.status();
        if (!sealed_first.has_value()) sealed_first = *sealed_now;
        reply.replayed = !*sealed_first;
        reply.totals = core.steps.open().Totals();
        waits = core.steps.waiting_count() > 0;
        core.MicroBatchChanged();
      }
      // If this or a later part fails, the step is sealed nevertheless, and a repeated call returns the rest.
      if (!waits) {
        absl::StatusOr<GradientStats> stats = core.on_engine->ComputeGradientStats();
        if (!stats.ok()) return stats.status();
        reply.stats = *stats;
        return reply;
      }
    }
    if (absl::Status status = AddInOrder(core, {limits.deadline}); !status.ok()) return status;
  }
}

absl::StatusOr<ApplyReply> Head::Apply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                       const ApplyArguments& arguments, const WaitLimits& limits) {
  while (true) {
    bool waits = false;
    {
      const Turn turn(core_->sequencer);
      waits = core_->steps.open().step == key.step && core_->steps.open().state == StepState::kSealed &&
              core_->steps.waiting_count() > 0;
    }
    // First of all, so that a parked call finds its place in the queue again.
    if (waits) {
      if (absl::Status status = AddInOrder(*core_, limits); !status.ok()) return status;
    }
    absl::StatusOr<std::optional<ApplyReply>> reply = TryApply(*core_, key, expected, arguments, limits);
    if (!reply.ok()) return reply.status();
    if (reply->has_value()) return **std::move(reply);
  }
}

absl::StatusOr<std::pair<int64_t, bool>> Head::DiscardGradient(const StepKey& key, const WaitLimits& limits) {
  HeadCore& core = *core_;
  const absl::StatusOr<scheduler::Admission> admission = core.Admit(kChangesGradient, limits);
  if (!admission.ok()) return admission.status();
  {
    const Turn turn(core.sequencer);
    if (absl::Status status = core.Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    const std::optional<StepRecord>& last_closed = core.steps.ledger().last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      if (last_closed->state == StepState::kDiscarded) return std::make_pair(core.steps.open().step, true);
      return MakeError(ErrorReason::kStepConflict,
                       absl::StrCat("step ", key.step, " was closed by ",
                                    last_closed->state == StepState::kReplaced ? "new weights" : "an update", "; the open step is ",
                                    core.steps.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(core.steps.open().step)}});
    }
    if (absl::Status status = core.steps.ledger().CheckClose(key.step, StepState::kDiscarded); !status.ok()) return status;
  }
  if (absl::Status status = core.AfterChange(core.on_engine->ZeroGradient()); !status.ok()) return status;
  const Turn turn(core.sequencer);
  if (absl::Status status = core.CloseStep(key.step, StepState::kDiscarded); !status.ok()) return status;
  return std::make_pair(core.steps.open().step, false);
}

absl::StatusOr<GradientStats> Head::GradientNorm(const StepKey& key, const WaitLimits& limits) const {
  HeadCore& core = *core_;
  const absl::StatusOr<scheduler::Admission> admission = core.Admit(kChangesGradient, limits);
  if (!admission.ok()) return admission.status();
  if (absl::Status status = CheckOpenStep(core, key); !status.ok()) return status;
  return core.on_engine->ComputeGradientStats();
}

absl::Status Head::ReadGradient(const StepKey& key, HeadTensor tensor, int64_t element_start, int64_t element_count, float* out,
                                const WaitLimits& limits) const {
  HeadCore& core = *core_;
  const absl::StatusOr<scheduler::Admission> admission = core.Admit(kChangesGradient, limits);
  if (!admission.ok()) return admission.status();
  if (absl::Status status = CheckOpenStep(core, key); !status.ok()) return status;
  return core.tensors.ReadGradient(tensor, element_start, element_count, out);
}

}  // namespace headwater::heads
