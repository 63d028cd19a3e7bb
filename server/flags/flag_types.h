// Flag types that read durations and sizes as people write them, for headwaterd and headwaterctl.
//
//   --timeout=5    --timeout=5s    --timeout=1m30s    a number alone is seconds
//   --memory_budget_bytes=17179869184    =16GiB    =16G    =16Gi    =16GB
//
// K, M, G, T and Ki, KiB, ... are powers of 1024; KB, MB, GB, TB are powers of 1000.
#ifndef HEADWATER_SERVER_FLAGS_FLAG_TYPES_H_
#define HEADWATER_SERVER_FLAGS_FLAG_TYPES_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace headwater {

// A duration. Parses to any absl::Duration, negative and infinite ones too: ranges are the program's to check.
struct DurationFlag {
  DurationFlag() = default;
  DurationFlag(absl::Duration duration) : value(duration) {}  // NOLINT: flags read and write it as a duration
  operator absl::Duration() const { return value; }           // NOLINT
  absl::Duration value;
};

// A number of bytes.
struct BytesFlag {
  BytesFlag() = default;
  BytesFlag(int64_t bytes) : value(bytes) {}  // NOLINT: flags read and write it as a number
  operator int64_t() const { return value; }  // NOLINT
  int64_t value = 0;
};

inline bool AbslParseFlag(absl::string_view text, DurationFlag* out, std::string* error) {
  const std::string trimmed(absl::StripAsciiWhitespace(text));
  double seconds = 0;
  if (absl::SimpleAtod(trimmed, &seconds) && !std::isnan(seconds)) {
    out->value = absl::Seconds(seconds);
    return true;
  }
  if (absl::ParseDuration(trimmed, &out->value)) return true;
  *error = "expected a duration such as 30, 30s, 500ms or 1m30s";
  return false;
}

inline std::string AbslUnparseFlag(const DurationFlag& flag) { return absl::FormatDuration(flag.value); }

inline bool AbslParseFlag(absl::string_view text, BytesFlag* out, std::string* error) {
  const absl::string_view trimmed = absl::StripAsciiWhitespace(text);
  const size_t digits = std::min(trimmed.find_first_not_of("+-.0123456789"), trimmed.size());
  const std::string unit = absl::AsciiStrToLower(absl::StripAsciiWhitespace(trimmed.substr(digits)));
  const absl::string_view number = trimmed.substr(0, digits);
  *error = "expected a number of bytes such as 1073741824, 512M, 16GiB or 1.5G (units of 1024), or 16GB (units of 1000)";
  int64_t factor = 1;
  if (!unit.empty() && unit != "b") {
    const size_t power = absl::string_view("kmgt").find(unit[0]);
    const std::string rest = unit.substr(1);
    if (power == absl::string_view::npos || (!rest.empty() && rest != "b" && rest != "i" && rest != "ib")) return false;
    for (size_t i = 0; i <= power; ++i) factor *= rest == "b" ? 1000 : 1024;
  }
  int64_t whole = 0;
  double value = 0;
  if (absl::SimpleAtoi(number, &whole)) {
    if (__builtin_mul_overflow(whole, factor, &out->value)) return false;
  } else if (factor > 1 && absl::SimpleAtod(number, &value) && std::abs(value * static_cast<double>(factor)) < 9.2e18) {
    out->value = static_cast<int64_t>(value * static_cast<double>(factor));
  } else {
    return false;
  }
  error->clear();
  return true;
}

inline std::string AbslUnparseFlag(const BytesFlag& flag) { return absl::StrCat(flag.value); }

}  // namespace headwater

#endif  // HEADWATER_SERVER_FLAGS_FLAG_TYPES_H_
