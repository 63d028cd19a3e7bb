#include "kernels/reference/optimizer_reference.h"

#include <cmath>

namespace headwater::reference {

void AdamWUpdate(const AdamWSpec& spec, double learning_rate, int64_t update_count, absl::Span<const double> gradient,
                 OptimizerState* state) {
  const double correction1 = 1 - std::pow(spec.beta1, static_cast<double>(update_count));
  const double correction2 = 1 - std::pow(spec.beta2, static_cast<double>(update_count));
  for (size_t i = 0; i < gradient.size(); ++i) {
    double& value = state->value[i];
    double& moment1 = state->moment1[i];
    double& moment2 = state->moment2[i];
    value -= learning_rate * spec.weight_decay * value;
    moment1 = spec.beta1 * moment1 + (1 - spec.beta1) * gradient[i];
    moment2 = spec.beta2 * moment2 + (1 - spec.beta2) * gradient[i] * gradient[i];
    value -= learning_rate * (moment1 / correction1) / (std::sqrt(moment2 / correction2) + spec.epsilon);
  }
}

void SgdUpdate(const SgdSpec& spec, double learning_rate, int64_t update_count, absl::Span<const double> gradient,
               OptimizerState* state) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    double& value = state->value[i];
    double& buffer = state->moment1[i];
    double direction = gradient[i] + spec.weight_decay * value;
    if (spec.momentum > 0) {
      // The first update sets the buffer without dampening.
      buffer = update_count == 1 ? direction : spec.momentum * buffer + (1 - spec.dampening) * direction;
      direction = spec.nesterov ? direction + spec.momentum * buffer : buffer;
    }
    value -= learning_rate * direction;
  }
}

}  // namespace headwater::reference
