// ValidateHeadSpec: ranges and combinations of a head's specification (docs/math.md).
#include <cmath>
#include <sstream>
#include <string>
#include <variant>

#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"

namespace headwater {
namespace {

template <typename T>
std::string ToText(const T& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

template <typename T>
absl::Status FieldError(const std::string& field, const std::string& expected, const T& actual) {
  return MakeError(ErrorReason::kInvalidField, field + " must be " + expected + ", got " + ToText(actual),
                   {{"field", field}, {"expected", expected}, {"actual", ToText(actual)}});
}

absl::Status CombinationError(const std::string& field, const std::string& message) {
  return MakeError(ErrorReason::kInvalidCombination, message, {{"field", field}});
}

bool InHalfOpenUnit(double value) { return value >= 0 && value < 1; }
bool FiniteAndNotNegative(double value) { return std::isfinite(value) && value >= 0; }

absl::Status ValidateAdamW(const AdamWSpec& adamw) {
  if (!InHalfOpenUnit(adamw.beta1)) return FieldError("optimizer.adamw.beta1", "in [0, 1)", adamw.beta1);
  if (!InHalfOpenUnit(adamw.beta2)) return FieldError("optimizer.adamw.beta2", "in [0, 1)", adamw.beta2);
  if (!FiniteAndNotNegative(adamw.epsilon)) return FieldError("optimizer.adamw.epsilon", "finite and >= 0", adamw.epsilon);
  if (!FiniteAndNotNegative(adamw.weight_decay)) {
    return FieldError("optimizer.adamw.weight_decay", "finite and >= 0", adamw.weight_decay);
  }
  return absl::OkStatus();
}

absl::Status ValidateSgd(const SgdSpec& sgd) {
  if (!InHalfOpenUnit(sgd.momentum)) return FieldError("optimizer.sgd.momentum", "in [0, 1)", sgd.momentum);
  if (!(sgd.dampening >= 0 && sgd.dampening <= 1)) return FieldError("optimizer.sgd.dampening", "in [0, 1]", sgd.dampening);
  if (!FiniteAndNotNegative(sgd.weight_decay)) {
    return FieldError("optimizer.sgd.weight_decay", "finite and >= 0", sgd.weight_decay);
  }
  if (sgd.nesterov && (sgd.momentum == 0 || sgd.dampening != 0)) {
    return CombinationError("optimizer.sgd.nesterov", "optimizer.sgd.nesterov needs momentum > 0 and dampening 0, got momentum " +
                                                          ToText(sgd.momentum) + " and dampening " + ToText(sgd.dampening));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateOptimizerSpec(const OptimizerSpec& optimizer) {
  if (const auto* adamw = std::get_if<AdamWSpec>(&optimizer)) return ValidateAdamW(*adamw);
  if (const auto* sgd = std::get_if<SgdSpec>(&optimizer)) return ValidateSgd(*sgd);
  return absl::OkStatus();
}

absl::Status ValidateHeadSpec(const HeadSpec& spec) {
  if (spec.vocab_size < 1) return FieldError("vocab_size", ">= 1", spec.vocab_size);
  // Vocabulary ids are 32-bit on the wire and in the outputs.
  if (spec.vocab_size > INT32_MAX) return FieldError("vocab_size", "at most 2147483647", spec.vocab_size);
  if (spec.hidden_size < 1) return FieldError("hidden_size", ">= 1", spec.hidden_size);
  // Products take 32-bit dimensions.
  if (spec.hidden_size > INT32_MAX) return FieldError("hidden_size", "at most 2147483647", spec.hidden_size);
  if (spec.data_type != DataType::kFloat32 && spec.data_type != DataType::kBFloat16 && spec.data_type != DataType::kFloat16) {
    return FieldError("data_type", "float32, bfloat16 or float16", static_cast<int32_t>(spec.data_type));
  }
  const LogitTransform& transform = spec.transform;
  // The scale is applied in fp32.
  const float scale = static_cast<float>(transform.logit_scale);
  if (!std::isfinite(scale) || scale == 0) return FieldError("logit_scale", "finite and not 0", transform.logit_scale);
  if (transform.softcap.has_value()) {
    const float softcap = static_cast<float>(*transform.softcap);
    if (!(std::isfinite(softcap) && softcap > 0)) return FieldError("softcap", "finite and > 0", *transform.softcap);
  }
  if (transform.valid_vocab_size < 1 || transform.valid_vocab_size > spec.vocab_size) {
    return FieldError("valid_vocab_size", "in [1, " + std::to_string(spec.vocab_size) + "]", transform.valid_vocab_size);
  }
  if (spec.staging_slots < 0) return FieldError("staging_slots", ">= 0", spec.staging_slots);
  if (spec.initial_step < 0) return FieldError("initial_step", ">= 0", spec.initial_step);
  if (spec.parallelism != Parallelism::kVocabulary && spec.parallelism != Parallelism::kRows) {
    return FieldError("parallelism", "vocabulary or rows", static_cast<int32_t>(spec.parallelism));
  }
  if (!spec.trainable && spec.staging_slots > 0) {
    return CombinationError("staging_slots",
                            "a head that is not trainable takes no staging slots, got " + std::to_string(spec.staging_slots));
  }
  if (!spec.trainable && !std::holds_alternative<std::monostate>(spec.optimizer)) {
    return CombinationError("optimizer", "a head that is not trainable takes no optimizer");
  }
  return ValidateOptimizerSpec(spec.optimizer);
}

}  // namespace headwater
