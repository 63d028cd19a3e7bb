#include "server/main_flag_checks.h"

#include <charconv>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace headwater {

absl::Status CheckAtLeast(const char* flag, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": expected >= ", least, ", got ", value));
}

absl::Status CheckPositive(const char* flag, absl::Duration value) {
  if (value > absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": expected a duration > 0, got ", absl::FormatDuration(value)));
}

absl::StatusOr<int> ParseMode(const char* flag, const std::string& text) {
  int mode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), mode, 8);
  if (error == std::errc() && end == text.data() + text.size() && mode >= 0 && mode <= 0777) return mode;
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected permissions from 0 to 0777, in octal, got \"", text, "\""));
}

}  // namespace headwater
