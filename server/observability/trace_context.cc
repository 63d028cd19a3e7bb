#include "server/observability/trace_context.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>

namespace headwater::observability {
namespace {

constexpr size_t kVersionDigits = 2;
constexpr size_t kTraceDigits = 32;
constexpr size_t kParentDigits = 16;
constexpr size_t kFlagDigits = 2;
constexpr size_t kLength = kVersionDigits + 1 + kTraceDigits + 1 + kParentDigits + 1 + kFlagDigits;

bool IsDigit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }
bool AreDigits(absl::string_view text) { return std::all_of(text.begin(), text.end(), IsDigit); }
bool AreZeros(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c == '0'; });
}

}  // namespace

std::optional<TraceContext> ParseTraceparent(absl::string_view text) {
  if (text.size() < kLength) return std::nullopt;
  const absl::string_view version = text.substr(0, kVersionDigits);
  size_t at = kVersionDigits + 1;
  const absl::string_view trace_id = text.substr(at, kTraceDigits);
  at += kTraceDigits + 1;
  const absl::string_view parent_id = text.substr(at, kParentDigits);
  at += kParentDigits + 1;
  const absl::string_view flags = text.substr(at, kFlagDigits);
  for (const size_t dash : {kVersionDigits, kVersionDigits + 1 + kTraceDigits, kLength - kFlagDigits - 1}) {
    if (text[dash] != '-') return std::nullopt;
  }
  if (!AreDigits(version) || !AreDigits(trace_id) || !AreDigits(parent_id) || !AreDigits(flags)) return std::nullopt;
  if (version == "ff" || AreZeros(trace_id) || AreZeros(parent_id)) return std::nullopt;
  if (text.size() > kLength && (version == "00" || text[kLength] != '-')) return std::nullopt;
  const char last = flags.back();
  const int low = last <= '9' ? last - '0' : last - 'a' + 10;
  return TraceContext{std::string(trace_id), std::string(parent_id), (low & 1) != 0};
}

std::string NewSpanId() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  uint64_t id = 0;
  while (id == 0) id = generator();
  char digits[kParentDigits + 1];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(id));
  return digits;
}

}  // namespace headwater::observability
