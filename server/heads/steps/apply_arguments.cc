// Arguments of an optimizer step: checked against the head's optimizer, and merged into its settings.
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/steps/step_calls.h"

namespace headwater::heads {
namespace {

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

}  // namespace

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

}  // namespace headwater::heads
