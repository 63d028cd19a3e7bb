// Head's steps: sealed, applied, discarded; their gradient read.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/head.h"
#include "server/heads/steps/pending_contribution.h"

namespace headwater::heads {
namespace {

// PyTorch's clip_grad_norm_ adds this to the norm.
constexpr double kClipEpsilon = 1e-6;

absl::Status OverrideError(const char* field, const char* owner) {
  return FieldError(ErrorReason::kInvalidCombination, field, absl::StrCat("nothing, or a head with ", owner), "an override");
}

bool IsFinite(double value) { return std::isfinite(static_cast<float>(value)); }  // engines compute in float32

absl::Status CheckRanges(const ApplyArguments& arguments) {
  struct Range {
    const char* field;
    std::optional<double> value;
    bool holds;
    const char* expected;
  };
  const auto amount = [](const char* field, std::optional<double> value) {
    return Range{field, value, value >= 0 && IsFinite(value.value_or(0)), "a number >= 0 that is finite in float32"};
  };
  const auto fraction = [](const char* field, std::optional<double> value) {
    return Range{field, value, value >= 0 && value < 1, "a number in [0, 1)"};
  };
  const double norm = arguments.other_grad_norm_squared;
  const Range ranges[] = {
      amount("learning_rate", arguments.learning_rate),
      {"gradient_factor", arguments.gradient_factor, IsFinite(arguments.gradient_factor), "a number that is finite in float32"},
      {"max_grad_norm", arguments.max_grad_norm, arguments.max_grad_norm > 0, "a number > 0, or 0 or infinity for no clipping"},
      {"other_grad_norm_squared", norm, norm >= 0 && std::isfinite(norm), "a finite number >= 0"},
      amount("weight_decay", arguments.weight_decay),
      amount("epsilon", arguments.epsilon),
      fraction("beta1", arguments.beta1),
      fraction("beta2", arguments.beta2),
      fraction("momentum", arguments.momentum)};
  for (const Range& range : ranges) {
    if (!range.value.has_value() || range.holds) continue;
    return FieldError(ErrorReason::kInvalidField, range.field, range.expected, absl::StrCat(*range.value));
  }
  return absl::OkStatus();
}

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

// kOptimizerNotConfigured; kInvalidCombination for an override of another optimizer's setting; kInvalidField for a value out of
// range.
absl::Status CheckApply(const HeadName& name, const HeadSpec& spec, const ApplyArguments& arguments) {
  const auto& optimizer = spec.optimizer;
  if (std::holds_alternative<std::monostate>(optimizer)) {
    return MakeError(ErrorReason::kOptimizerNotConfigured, absl::StrCat(name.ToString(), " was created without an optimizer"),
                     {{"head", name.ToString()}});
  }
  HEADWATER_RETURN_IF_ERROR(CheckRanges(arguments));
  if (!std::holds_alternative<AdamWSpec>(optimizer)) {
    if (arguments.beta1.has_value()) return OverrideError("beta1", "AdamW");
    if (arguments.beta2.has_value()) return OverrideError("beta2", "AdamW");
    if (arguments.epsilon.has_value()) return OverrideError("epsilon", "AdamW");
  }
  if (arguments.momentum.has_value()) {
    const SgdSpec* sgd = std::get_if<SgdSpec>(&optimizer);
    if (sgd == nullptr || sgd->momentum == 0) return OverrideError("momentum", "SGD with momentum");
    if (sgd->nesterov && *arguments.momentum == 0) return OverrideError("momentum", "SGD without Nesterov's momentum, if it is 0");
  }
  return absl::OkStatus();
}

// The checks of a call on the gradient of the open or sealed step.
absl::Status CheckOpenStep(const Head& head, const StepKey& key) {
  const Turn turn(head.sequencer);
  HEADWATER_RETURN_IF_ERROR(head.Check(key.epoch, Need::kReady, true));
  HEADWATER_RETURN_IF_ERROR(head.steps.ledger().CheckStep(key.step));
  return head.steps.CheckNothingWaits();
}

// Waits while micro-batches that Seal() needs are missing or undecided. OK when there is nothing to wait for, and at the deadline.
absl::Status AwaitMicroBatches(Head& head, const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& limits) {
  const Turn turn(head.sequencer);
  while (true) {
    HEADWATER_RETURN_IF_ERROR(head.Check(key.epoch, Need::kReady, true));
    const absl::Status complete = head.steps.ledger().CheckSeal(key.step, expected);
    const bool lacks_some =
        HasReason(complete, ErrorReason::kMicroBatchMissing) || HasReason(complete, ErrorReason::kMicroBatchUncommitted);
    // A sealed step takes nothing more, even if it was sealed with another expectation.
    if (!lacks_some || head.steps.open().state != StepState::kOpen) return absl::OkStatus();
    // A try that waited for the head has kept its place there: those that bring the micro-batches must not stand behind it.
    head.sequencer.GiveUpPlace(limits.waiter);
    const absl::Status waited =
        Wait(*head.micro_batch_changed, head.sequencer.mutex(), limits, "waited for micro-batches of its step");
    if (!waited.ok()) return HasReason(waited, ErrorReason::kDeadlineExceeded) ? absl::OkStatus() : waited;
  }
}

// Null if waiting contributions must be added to the sealed step first.
absl::StatusOr<std::optional<ApplyReply>> TryApply(Head& head, const StepKey& key,
                                                   const std::optional<ExpectedMicroBatches>& expected,
                                                   const ApplyArguments& arguments, const WaitLimits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(scheduler::Admission admission, head.Admit(kWritesWeights, limits));
  ApplyReply reply;
  OptimizerStep step;
  {
    const Turn turn(head.sequencer);
    HEADWATER_RETURN_IF_ERROR(head.Check(key.epoch, Need::kReady, true));
    HEADWATER_RETURN_IF_ERROR(CheckApply(head.name(), head.spec(), arguments));
    if (const StepRecord* closed = head.steps.ledger().FindClosed(key.step); closed != nullptr) {
      if (closed->state != StepState::kApplied) return head.StepConflict(key.step, "another call");
      const AppliedStep& applied = *head.steps.last_apply();
      const bool same = applied.arguments == arguments &&
                        (!expected.has_value() || !applied.expected.has_value() || *expected == *applied.expected);
      if (!same) return head.StepConflict(key.step, "an update with other arguments");
      reply = applied.reply;
      reply.replayed = true;
      return reply;
    }
    if (expected.has_value()) {
      HEADWATER_RETURN_IF_ERROR(head.steps.ledger().Seal(key.step, *expected).status());
      head.MicroBatchChanged();  // also if the update fails: no more micro-batches come
    } else {
      HEADWATER_RETURN_IF_ERROR(head.steps.ledger().CheckStep(key.step));
      if (head.steps.open().state == StepState::kOpen) {
        return MakeError(
            ErrorReason::kMissingField,
            absl::StrCat("expected must say which micro-batches step ", key.step, " consists of, because it is still open"),
            {{"field", "expected"}, {"expected", "a count or ids"}, {"actual", "nothing"}, {"step", absl::StrCat(key.step)}});
      }
    }
    if (head.steps.waiting_count() > 0) return std::optional<ApplyReply>();
    HEADWATER_RETURN_IF_ERROR(head.steps.ledger().CheckClose(key.step, StepState::kApplied));
    reply.totals = head.steps.open().Totals();
    step.update_count = head.weights.update_count() + 1;
  }

  HEADWATER_ASSIGN_OR_RETURN(const GradientStats stats, head.on_engine->ComputeGradientStats());
  reply.gradient_norm_squared = stats.norm_squared * arguments.gradient_factor * arguments.gradient_factor;
  reply.global_grad_norm = std::sqrt(reply.gradient_norm_squared + arguments.other_grad_norm_squared);
  if (stats.non_finite_count > 0 || !std::isfinite(reply.global_grad_norm)) {
    return MakeError(ErrorReason::kNonFiniteGradient,
                     absl::StrCat("the gradient of step ", key.step, " has ", stats.non_finite_count,
                                  " non-finite elements and the global norm ", reply.global_grad_norm,
                                  "; nothing was changed, discard the gradient to go on"),
                     {{"step", absl::StrCat(key.step)},
                      {"nonFiniteCount", absl::StrCat(stats.non_finite_count)},
                      {"globalGradNorm", absl::StrCat(reply.global_grad_norm)}});
  }
  if (arguments.max_grad_norm.has_value()) {
    reply.clip_factor = std::min(1.0, *arguments.max_grad_norm / (reply.global_grad_norm + kClipEpsilon));
  }
  step.learning_rate = arguments.learning_rate;
  step.gradient_multiplier = arguments.gradient_factor * reply.clip_factor;
  step.settings = WithOverrides(head.spec().optimizer, arguments);
  HEADWATER_RETURN_IF_ERROR(head.AfterChange(head.on_engine->ApplyOptimizer(step)));

  const Turn turn(head.sequencer);
  HEADWATER_RETURN_IF_ERROR(head.CloseStep(key.step, StepState::kApplied));
  head.weights.SetUpdateCount(step.update_count);
  reply.open_step = head.steps.open().step;
  reply.weight_version = head.weights.NextVersion();
  head.weights.SetChecksum("");
  head.steps.last_apply() = {arguments, expected, reply};
  admission.Release();  // in this turn: who waited for the step finds the head free
  return reply;
}

}  // namespace

absl::StatusOr<std::pair<StepRecord, std::optional<StepRecord>>> Head::GetSteps(const Epoch& epoch) const {
  const Turn turn(sequencer);
  HEADWATER_RETURN_IF_ERROR(Check(epoch, Need::kNotLost, true));
  return std::make_pair(steps.open(), steps.ledger().last_closed());
}

absl::StatusOr<SealReply> Head::Seal(const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& wait,
                                     const WaitLimits& limits) {
  HEADWATER_RETURN_IF_ERROR(AwaitMicroBatches(*this, key, expected, wait.ForStep()));
  std::optional<bool> sealed_first;
  while (true) {
    // Once it has sealed the step this call must not be tried again: it would take itself for a repeat. So this thread waits.
    const WaitLimits here = sealed_first.has_value() ? WaitLimits{limits.deadline} : limits;
    {
      HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kChangesGradient, here));
      SealReply reply;
      bool waits = false;
      {
        const Turn turn(sequencer);
        HEADWATER_RETURN_IF_ERROR(Check(key.epoch, Need::kReady, true));
        HEADWATER_ASSIGN_OR_RETURN(const bool sealed_now, steps.ledger().Seal(key.step, expected));
        if (!sealed_first.has_value()) sealed_first = sealed_now;
        reply.replayed = !*sealed_first;
        reply.totals = steps.open().Totals();
        waits = steps.waiting_count() > 0;
        MicroBatchChanged();
      }
      // If this or a later part fails, the step is sealed nevertheless, and a repeated call returns the rest.
      if (!waits) {
        HEADWATER_ASSIGN_OR_RETURN(reply.stats, on_engine->ComputeGradientStats());
        return reply;
      }
    }
    HEADWATER_RETURN_IF_ERROR(AddInOrder(*this, {limits.deadline}));
  }
}

absl::StatusOr<ApplyReply> Head::Apply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                       const ApplyArguments& arguments, const WaitLimits& limits) {
  while (true) {
    bool waits = false;
    {
      const Turn turn(sequencer);
      waits = steps.open().step == key.step && steps.open().state == StepState::kSealed && steps.waiting_count() > 0;
    }
    // First of all, so that a parked call finds its place in the queue again.
    if (waits) HEADWATER_RETURN_IF_ERROR(AddInOrder(*this, limits));
    HEADWATER_ASSIGN_OR_RETURN(std::optional<ApplyReply> reply, TryApply(*this, key, expected, arguments, limits));
    if (reply.has_value()) return *std::move(reply);
  }
}

absl::StatusOr<std::pair<int64_t, bool>> Head::DiscardGradient(const StepKey& key, const WaitLimits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kChangesGradient, limits));
  {
    const Turn turn(sequencer);
    HEADWATER_RETURN_IF_ERROR(Check(key.epoch, Need::kReady, true));
    if (const StepRecord* closed = steps.ledger().FindClosed(key.step); closed != nullptr) {
      if (closed->state == StepState::kDiscarded) return std::make_pair(steps.open().step, true);
      return StepConflict(key.step, closed->state == StepState::kReplaced ? "new weights" : "an update");
    }
    HEADWATER_RETURN_IF_ERROR(steps.ledger().CheckClose(key.step, StepState::kDiscarded));
  }
  HEADWATER_RETURN_IF_ERROR(AfterChange(on_engine->ZeroGradient()));
  const Turn turn(sequencer);
  HEADWATER_RETURN_IF_ERROR(CloseStep(key.step, StepState::kDiscarded));
  return std::make_pair(steps.open().step, false);
}

absl::StatusOr<GradientStats> Head::GradientNorm(const StepKey& key, const WaitLimits& limits) const {
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kChangesGradient, limits));
  HEADWATER_RETURN_IF_ERROR(CheckOpenStep(*this, key));
  return on_engine->ComputeGradientStats();
}

absl::Status Head::ReadGradient(const StepKey& key, HeadTensor tensor, int64_t element_start, int64_t element_count, float* out,
                                const WaitLimits& limits) const {
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kChangesGradient, limits));
  HEADWATER_RETURN_IF_ERROR(CheckOpenStep(*this, key));
  return tensors.ReadGradient(tensor, element_start, element_count, out);
}

}  // namespace headwater::heads
