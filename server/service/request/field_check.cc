#include "server/service/request/field_check.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace headwater::service {

absl::Status LimitError(ErrorReason reason, const std::string& field, const std::string& expected, int64_t actual,
                        const char* limit, int64_t maximum) {
  return MakeError(reason, absl::StrCat(field, ": expected ", expected, ", got ", actual),
                   {{"field", field},
                    {"limit", limit},
                    {"maximum", absl::StrCat(maximum)},
                    {"expected", expected},
                    {"actual", absl::StrCat(actual)}});
}

absl::Status InvalidField(const std::string& field, const std::string& expected, const std::string& actual) {
  return FieldError(ErrorReason::kInvalidField, field, expected, actual);
}

absl::Status InvalidCombination(const std::string& field, const std::string& expected, const std::string& actual) {
  return FieldError(ErrorReason::kInvalidCombination, field, expected, actual);
}

absl::Status MissingField(const std::string& field, const std::string& expected) {
  return FieldError(ErrorReason::kMissingField, field, expected, "nothing");
}

absl::Status FeatureNotBuilt(const std::string& field, const std::string& feature) {
  return MakeError(ErrorReason::kFeatureNotBuilt, absl::StrCat(field, ": this build does not have the feature ", feature),
                   {{"field", field}, {"feature", feature}});
}

absl::Status CheckRange(const std::string& field, int64_t value, int64_t minimum, int64_t maximum) {
  if (value >= minimum && value <= maximum) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("a number in [", minimum, ", ", maximum, "]"), absl::StrCat(value));
}

absl::Status CheckAtLeast(const std::string& field, int64_t value, int64_t minimum) {
  if (value >= minimum) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("at least ", minimum), absl::StrCat(value));
}

absl::StatusOr<int64_t> AtLeast(const std::string& field, int64_t value, int64_t minimum) {
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field, value, minimum));
  return value;
}

absl::StatusOr<std::optional<int64_t>> OptionalNumber(const std::string& field, bool present, int64_t value) {
  if (!present) return std::nullopt;
  return AtLeast(field, value, 0);
}

absl::Status CheckLimit(const std::string& field, int64_t value, const char* limit, int64_t maximum) {
  if (value <= maximum) return absl::OkStatus();
  return LimitError(ErrorReason::kLimitExceeded, field, absl::StrCat("at most ", maximum, " (", limit, ")"), value, limit, maximum);
}

absl::StatusOr<double> FactorOrOne(const std::string& field, bool present, double value) {
  if (!present) return 1;
  if (std::isfinite(static_cast<float>(value))) return value;
  return InvalidField(field, "a number that is finite in float32", absl::StrCat(value));
}

std::string Quoted(const std::string& text) {
  constexpr size_t kMostBytes = 64;
  std::string quoted = "\"";
  for (const char c : text.substr(0, kMostBytes)) quoted += (c >= 0x20 && c < 0x7f) ? c : '?';
  return quoted + (text.size() > kMostBytes ? "...\"" : "\"");
}

}  // namespace headwater::service
