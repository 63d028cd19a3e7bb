#include "kernels/core/optimizer_step.h"

#include <cmath>
#include <string>
#include <utility>
#include <variant>

#include "headwater/kernels/error.h"
#include "kernels/core/head_tensors.h"

namespace headwater {

absl::Status CheckOptimizerStep(const HeadSpec& spec, const OptimizerStep& step) {
  if (std::holds_alternative<std::monostate>(spec.optimizer)) {
    return MakeError(ErrorReason::kOptimizerNotConfigured, "the head was created without an optimizer");
  }
  if (step.settings.index() != spec.optimizer.index()) {
    return MakeError(ErrorReason::kInvalidCombination, "settings must be of the head's own kind of optimizer",
                     {{"field", "settings"}});
  }
  absl::Status status = ValidateOptimizerSpec(step.settings);
  if (!status.ok()) return status;
  const auto* sgd = std::get_if<SgdSpec>(&step.settings);
  if (sgd != nullptr && sgd->momentum > 0 && OptimizerStateTensors(spec.optimizer) == 0) {
    return MakeError(ErrorReason::kInvalidCombination,
                     "settings.sgd.momentum must be 0: the head was created without momentum and has no buffer for it",
                     {{"field", "settings.sgd.momentum"}});
  }
  for (const auto& [field, value] :
       {std::pair<const char*, double>{"learning_rate", step.learning_rate}, {"gradient_multiplier", step.gradient_multiplier}}) {
    if (!std::isfinite(value)) {
      return MakeError(ErrorReason::kInvalidField, std::string(field) + " must be finite, got " + std::to_string(value),
                       {{"field", field}});
    }
  }
  if (step.learning_rate < 0) {
    return MakeError(ErrorReason::kInvalidField, "learning_rate must be >= 0, got " + std::to_string(step.learning_rate),
                     {{"field", "learning_rate"}});
  }
  if (step.update_count < 1) {
    return MakeError(ErrorReason::kInvalidField, "update_count must be >= 1, got " + std::to_string(step.update_count),
                     {{"field", "update_count"}});
  }
  return absl::OkStatus();
}

AdamWScalars MakeAdamWScalars(const OptimizerStep& step, const AdamWSpec& adamw) {
  const double count = static_cast<double>(step.update_count);
  AdamWScalars scalars;
  scalars.multiplier = static_cast<float>(step.gradient_multiplier);
  scalars.decay = static_cast<float>(1 - step.learning_rate * adamw.weight_decay);
  scalars.one_minus_beta1 = static_cast<float>(1 - adamw.beta1);
  scalars.beta2 = static_cast<float>(adamw.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - adamw.beta2);
  scalars.step_size = static_cast<float>(step.learning_rate / (1 - std::pow(adamw.beta1, count)));
  scalars.root_correction = static_cast<float>(std::sqrt(1 - std::pow(adamw.beta2, count)));
  scalars.epsilon = static_cast<float>(adamw.epsilon);
  return scalars;
}

SgdScalars MakeSgdScalars(const OptimizerStep& step, const SgdSpec& sgd) {
  SgdScalars scalars;
  scalars.multiplier = static_cast<float>(step.gradient_multiplier);
  scalars.learning_rate = static_cast<float>(step.learning_rate);
  scalars.weight_decay = static_cast<float>(sgd.weight_decay);
  scalars.momentum = static_cast<float>(sgd.momentum);
  scalars.one_minus_dampening = static_cast<float>(1 - sgd.dampening);
  scalars.first_step = step.update_count == 1;
  scalars.nesterov = sgd.nesterov;
  return scalars;
}

}  // namespace headwater
