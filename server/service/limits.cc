#include "server/service/limits.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/each_name.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/return_if_error.h"
#include "server/service/server_options.h"

namespace headwater::service {
namespace {

// All per-token outputs of a row, of four bytes each.
#define HEADWATER_COUNT_OUTPUT(name) +4
constexpr int64_t kTokenOutputBytes = 0 HEADWATER_EACH(HEADWATER_COUNT_OUTPUT, HEADWATER_TOKEN_OUTPUTS);
#undef HEADWATER_COUNT_OUTPUT

template <typename Number>
std::string Text(Number value) {
  return absl::StrCat(value);
}
std::string Text(absl::Duration value) { return absl::FormatDuration(value); }

template <typename Value>
absl::Status CheckBounds(const char* name, Value value, Value minimum, Value maximum) {
  if (value >= minimum && value <= maximum) return absl::OkStatus();
  const std::string bound = value < minimum ? absl::StrCat("at least ", Text(minimum)) : absl::StrCat("at most ", Text(maximum));
  return absl::InvalidArgumentError(absl::StrCat(name, ": expected ", bound, ", got ", Text(value)));
}

}  // namespace

#define HEADWATER_CHECK_LIMIT(unit, name, default_value, minimum, maximum, help) \
  HEADWATER_RETURN_IF_ERROR(CheckBounds<unit##Limit::Value>(#name, limits.name, minimum, maximum));

absl::Status ValidateSettings(const ServerOptions& limits) {
  HEADWATER_SERVER_SETTINGS(HEADWATER_CHECK_LIMIT)
  return absl::OkStatus();
}

absl::Status ValidateLimits(const Limits& limits) {
  HEADWATER_LIMITS(HEADWATER_CHECK_LIMIT)
#undef HEADWATER_CHECK_LIMIT
  if (limits.max_hidden_size > (limits.max_chunk_bytes / 4)) {
    return absl::InvalidArgumentError(absl::StrCat("max_chunk_bytes: expected room for one fp32 row of max_hidden_size ",
                                                   limits.max_hidden_size, ", got ", limits.max_chunk_bytes));
  }
  if (limits.max_chunk_bytes > limits.max_message_bytes - kMessageOverheadBytes) {
    return absl::InvalidArgumentError(absl::StrCat("max_message_bytes: expected at least 64 KiB more than max_chunk_bytes ",
                                                   limits.max_chunk_bytes, ", got ", limits.max_message_bytes));
  }
  if (limits.max_micro_batch_rows > (limits.max_message_bytes - kMessageOverheadBytes) / kTokenOutputBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_message_bytes: expected room for all per-token outputs of max_micro_batch_rows ",
                     limits.max_micro_batch_rows, ", got ", limits.max_message_bytes));
  }
  return absl::OkStatus();
}

}  // namespace headwater::service
