#include "headwater/kernels/loss_options.h"

#include <cmath>
#include <variant>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/finite.h"

namespace headwater {
namespace {

absl::Status CheckNumber(const std::string& field, double value, bool holds, const std::string& expected) {
  return holds ? absl::OkStatus() : FieldError(ErrorReason::kInvalidField, field, expected, absl::StrCat(value));
}

absl::Status CheckShare(const std::string& field, double value) {
  return CheckNumber(field, value, value >= 0 && value <= 1, "a number in [0, 1]");
}

// Logits are float32, and multiplied by its reciprocal.
absl::Status CheckTemperature(const std::string& field, double value) {
  const float reciprocal = static_cast<float>(1 / value);
  return CheckNumber(field, value, std::isfinite(value) && value > 0 && reciprocal > 0 && std::isfinite(reciprocal),
                     "a finite number > 0 whose reciprocal is a float32 > 0");
}

absl::Status CheckLoss(const std::string& field, const CrossEntropySpec& spec) {
  HEADWATER_RETURN_IF_ERROR(CheckShare(field + ".label_smoothing", spec.label_smoothing));
  HEADWATER_RETURN_IF_ERROR(CheckNumber(field + ".z_loss", spec.z_loss, spec.z_loss >= 0 && IsFinite(spec.z_loss),
                                        "a number >= 0 that is finite in float32"));
  return CheckTemperature(field + ".temperature", spec.temperature);
}

absl::Status CheckLoss(const std::string& field, const JsdSpec& spec) {
  HEADWATER_RETURN_IF_ERROR(CheckShare(field + ".beta", spec.beta));
  HEADWATER_RETURN_IF_ERROR(CheckTemperature(field + ".student_temperature", spec.student_temperature));
  HEADWATER_RETURN_IF_ERROR(CheckTemperature(field + ".teacher_temperature", spec.teacher_temperature));
  HEADWATER_RETURN_IF_ERROR(CheckShare(field + ".hard_loss_weight", spec.hard_loss_weight));
  const std::string hard_loss = field + ".hard_loss";
  HEADWATER_RETURN_IF_ERROR(CheckLoss(hard_loss, spec.hard_loss));
  if (spec.hard_loss.temperature != 1) {
    return FieldError(ErrorReason::kInvalidCombination, hard_loss + ".temperature",
                      "nothing, because a divergence's hard loss takes none", absl::StrCat(spec.hard_loss.temperature));
  }
  if (!spec.hard_loss.token_scaling) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidCombination, hard_loss + ".token_scaling",
                    "false, because a divergence's hard loss takes none", "true");
}

absl::Status CheckLoss(const std::string& field, const LossTerm& term) {
  if (const auto* cross_entropy = std::get_if<CrossEntropySpec>(&term.loss)) {
    return CheckLoss(field + ".cross_entropy", *cross_entropy);
  }
  if (const auto* jsd = std::get_if<JsdSpec>(&term.loss)) return CheckLoss(field + ".jensen_shannon", *jsd);
  const TopKSpec& top_k = std::get<TopKSpec>(term.loss);
  HEADWATER_RETURN_IF_ERROR(CheckNumber(field + ".top_k_teacher.k", top_k.k, top_k.k >= 1 && top_k.k <= kMaxTopK,
                                        absl::StrCat("a number in [1, ", kMaxTopK, "]")));
  return CheckTemperature(field + ".jensen_shannon.student_temperature", top_k.student_temperature);
}

absl::Status CheckFactors(const std::string& field, const LossTerm& term, bool backward) {
  if (term.entropy_factors.empty() && term.lse_factors.empty()) return absl::OkStatus();
  const char* why = nullptr;
  if (!std::holds_alternative<CrossEntropySpec>(term.loss)) {
    why = "nothing, because the loss is jensen_shannon";
  } else if (!backward) {
    why = "nothing, because the call is FORWARD_ONLY";
  }
  if (why == nullptr) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidCombination, field + (term.entropy_factors.empty() ? ".lse_factors" : ".entropy_factors"),
                    why, "factors");
}

absl::Status CheckResolution(const std::string& field, const LossTerm& term, bool backward) {
  const double resolution = term.gradient_resolution;
  if (resolution == 0) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(
      CheckNumber(field, resolution, resolution >= kSmallestGradientResolution && resolution <= 1, "0 or a number in [2^-24, 1]"));
  const auto* jsd = std::get_if<JsdSpec>(&term.loss);
  const char* why = nullptr;
  if (!backward) {
    why = "0, because the call is FORWARD_ONLY";
  } else if (!term.entropy_factors.empty() || !term.lse_factors.empty()) {
    why = "0, because of the factors of entropy or lse";
  } else if (jsd != nullptr && jsd->hard_loss_weight > 0) {
    why = "0, because of the hard loss";
  } else if (std::holds_alternative<TopKSpec>(term.loss)) {
    why = "0, because of the top_k_teacher";
  }
  return why == nullptr ? absl::OkStatus() : FieldError(ErrorReason::kInvalidCombination, field, why, absl::StrCat(resolution));
}

}  // namespace

absl::Status CheckTermOptions(const std::string& field, const LossTerm& term, bool backward) {
  HEADWATER_RETURN_IF_ERROR(
      CheckNumber(field + ".loss_scale", term.loss_scale, IsFinite(term.loss_scale), "a number that is finite in float32"));
  HEADWATER_RETURN_IF_ERROR(CheckLoss(field, term));
  HEADWATER_RETURN_IF_ERROR(CheckFactors(field, term, backward));
  return CheckResolution(field + ".gradient_resolution", term, backward);
}

absl::Status CheckTermOptionsWithHead(const std::string& field, const LossTerm& term, const HeadSpec& head) {
  const auto* cross_entropy = std::get_if<CrossEntropySpec>(&term.loss);
  const bool smooths = cross_entropy != nullptr && cross_entropy->label_smoothing > 0;
  if (term.gradient_resolution == 0 || !smooths || !head.transform.softcap.has_value()) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidCombination, field + ".gradient_resolution",
                    "0, because of label_smoothing behind the head's softcap", absl::StrCat(term.gradient_resolution));
}

}  // namespace headwater
