#include "server/heads/apply_arguments.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::heads {
namespace {

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

}  // namespace headwater::heads
