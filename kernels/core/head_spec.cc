// ValidateHeadSpec: ranges and combinations of a head's specification (docs/math.md).
#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/finite.h"

namespace headwater {
namespace {

template <typename T>
absl::Status Check(const std::string& field, const T& value, bool holds, const std::string& expected) {
  return holds ? absl::OkStatus() : FieldError(ErrorReason::kInvalidField, field, expected, absl::StrCat(value));
}

absl::Status CheckFraction(const std::string& field, double value) {
  return Check(field, value, value >= 0 && value < 1, "a number in [0, 1)");
}

absl::Status CheckNotNegative(const std::string& field, double value) {
  return Check(field, value, value >= 0 && IsFinite(value), "a number >= 0 that is finite in float32");
}

absl::Status Validate(const std::string& field, const AdamWSpec& adamw) {
  HEADWATER_RETURN_IF_ERROR(CheckFraction(field + ".beta1", adamw.beta1));
  HEADWATER_RETURN_IF_ERROR(CheckFraction(field + ".beta2", adamw.beta2));
  HEADWATER_RETURN_IF_ERROR(CheckNotNegative(field + ".epsilon", adamw.epsilon));
  return CheckNotNegative(field + ".weight_decay", adamw.weight_decay);
}

absl::Status Validate(const std::string& field, const SgdSpec& sgd) {
  HEADWATER_RETURN_IF_ERROR(CheckFraction(field + ".momentum", sgd.momentum));
  HEADWATER_RETURN_IF_ERROR(
      Check(field + ".dampening", sgd.dampening, sgd.dampening >= 0 && sgd.dampening <= 1, "a number in [0, 1]"));
  HEADWATER_RETURN_IF_ERROR(CheckNotNegative(field + ".weight_decay", sgd.weight_decay));
  if (!sgd.nesterov || (sgd.momentum > 0 && sgd.dampening == 0)) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidCombination, field + ".nesterov", "false, because it needs momentum > 0 and dampening = 0",
                    "true");
}

}  // namespace

absl::Status ValidateOptimizerSpec(const OptimizerSpec& optimizer, const std::string& path) {
  if (const auto* adamw = std::get_if<AdamWSpec>(&optimizer)) return Validate(path + "optimizer.adamw", *adamw);
  if (const auto* sgd = std::get_if<SgdSpec>(&optimizer)) return Validate(path + "optimizer.sgd", *sgd);
  return absl::OkStatus();
}

absl::Status ValidateHeadSpec(const HeadSpec& spec, const std::string& path) {
  // Vocabulary ids are 32-bit on the wire and in the outputs, and products take 32-bit dimensions.
  const std::string size = absl::StrCat("a number in [1, ", INT32_MAX, "]");
  const auto is_size = [](int64_t value) { return value >= 1 && value <= INT32_MAX; };
  HEADWATER_RETURN_IF_ERROR(Check(path + "vocab_size", spec.vocab_size, is_size(spec.vocab_size), size));
  HEADWATER_RETURN_IF_ERROR(Check(path + "hidden_size", spec.hidden_size, is_size(spec.hidden_size), size));
  const bool is_float =
      spec.data_type == DataType::kFloat32 || spec.data_type == DataType::kBFloat16 || spec.data_type == DataType::kFloat16;
  HEADWATER_RETURN_IF_ERROR(
      Check(path + "data_type", static_cast<int32_t>(spec.data_type), is_float, "FLOAT32, BFLOAT16 or FLOAT16"));
  const LogitTransform& transform = spec.transform;
  // The scale is applied in fp32.
  const bool scales = IsFinite(transform.logit_scale) && static_cast<float>(transform.logit_scale) != 0;
  HEADWATER_RETURN_IF_ERROR(Check(path + "transform.logit_scale", transform.logit_scale, scales, "a finite number other than 0"));
  if (transform.softcap.has_value()) {
    const bool caps = IsFinite(*transform.softcap) && static_cast<float>(*transform.softcap) > 0;
    HEADWATER_RETURN_IF_ERROR(Check(path + "transform.softcap", *transform.softcap, caps, "a finite number > 0"));
  }
  const bool is_valid = transform.valid_vocab_size >= 1 && transform.valid_vocab_size <= spec.vocab_size;
  HEADWATER_RETURN_IF_ERROR(Check(path + "transform.valid_vocab_size", transform.valid_vocab_size, is_valid,
                                  absl::StrCat("a number in [1, ", spec.vocab_size, "]")));
  HEADWATER_RETURN_IF_ERROR(Check(path + "staging_slots", spec.staging_slots, spec.staging_slots >= 0, "at least 0"));
  HEADWATER_RETURN_IF_ERROR(Check(path + "initial_step", spec.initial_step, spec.initial_step >= 0, "at least 0"));
  const bool is_known = spec.parallelism == Parallelism::kVocabulary || spec.parallelism == Parallelism::kRows;
  HEADWATER_RETURN_IF_ERROR(Check(path + "parallelism", static_cast<int32_t>(spec.parallelism), is_known, "VOCABULARY or ROWS"));
  HEADWATER_RETURN_IF_ERROR(ValidateOptimizerSpec(spec.optimizer, path));
  if (spec.int8_teacher) {
    const bool fits = !spec.trainable && spec.data_type != DataType::kFloat32 && spec.hidden_size <= kMaxInt8HiddenSize;
    if (!fits) {
      return FieldError(
          ErrorReason::kInvalidCombination, path + "int8_teacher",
          absl::StrCat("false: true is for a frozen head of BFLOAT16 or FLOAT16 whose hidden_size is at most ", kMaxInt8HiddenSize),
          "true");
    }
  }
  if (spec.trainable) return absl::OkStatus();
  if (!std::holds_alternative<std::monostate>(spec.optimizer)) {
    return FieldError(ErrorReason::kInvalidCombination, path + "optimizer", "nothing, because the head is frozen", "an optimizer");
  }
  if (spec.staging_slots == 0) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidCombination, path + "staging_slots", "0, because the head is frozen",
                    absl::StrCat(spec.staging_slots));
}

}  // namespace headwater
