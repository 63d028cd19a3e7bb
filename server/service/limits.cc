#include "server/service/limits.h"

#include <climits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace headwater::service {
namespace {

// Five per-token outputs of four bytes.
constexpr int64_t kTokenOutputBytes = 5 * 4;
constexpr absl::Duration kMaxDuration = absl::Hours(1000);
// gRPC counts milliseconds in 31 bits.
constexpr absl::Duration kMaxGrpcDuration = absl::Hours(500);
constexpr int64_t kMostOfAll = INT32_MAX;

}  // namespace

absl::Status ValidateLimits(const Limits& limits) {
  struct Least {
    const char* name;
    int64_t value;
    int64_t least;
  };
  const Least leasts[] = {
      {"max_message_bytes", limits.max_message_bytes, 1},
      {"max_chunk_bytes", limits.max_chunk_bytes, 1},
      {"max_micro_batch_rows", limits.max_micro_batch_rows, 1},
      {"max_micro_batch_bytes", limits.max_micro_batch_bytes, 1},
      {"max_vocab_size", limits.max_vocab_size, 1},
      {"max_hidden_size", limits.max_hidden_size, 1},
      {"max_heads", limits.max_heads, 1},
      {"max_step_micro_batches", limits.max_step_micro_batches, 1},
      {"max_queue_depth", limits.max_queue_depth, 1},
      {"max_in_flight_bytes", limits.max_in_flight_bytes, 1},
      {"max_upload_bytes", limits.max_upload_bytes, 1},
      {"max_sessions", limits.max_sessions, 1},
      {"max_heads_per_tenant", limits.max_heads_per_tenant, 1},
      {"max_terms", limits.max_terms, 1},
      {"max_stripes", limits.max_stripes, 1},
      {"max_connections", limits.max_connections, 1},
      {"max_connection_streams", limits.max_connection_streams, 1},
      {"max_metadata_bytes", limits.max_metadata_bytes, kLeastMetadataBytes},
      {"max_health_watches", limits.max_health_watches, 1},
      {"ordered_window", limits.ordered_window, 1},
      {"max_held_bytes", limits.max_held_bytes, 0},
      {"max_waiting_calls", limits.max_waiting_calls, 0},
      {"max_tenant_memory_bytes", limits.max_tenant_memory_bytes, 0},
      {"max_session_regions", limits.max_session_regions, 0},
      {"max_region_bytes", limits.max_region_bytes, 0},
      {"max_join_bytes", limits.max_join_bytes, 0},
  };
  for (const auto& [name, value, least] : leasts) {
    if (value < least) return absl::InvalidArgumentError(absl::StrCat(name, ": expected at least ", least, ", got ", value));
  }
  const std::pair<const char*, absl::Duration> durations[] = {
      {"max_session_lease", limits.max_session_lease}, {"max_step_wait", limits.max_step_wait},
      {"max_stripe_wait", limits.max_stripe_wait},     {"max_join_wait", limits.max_join_wait},
      {"max_stream_time", limits.max_stream_time},
  };
  for (const auto& [name, value] : durations) {
    if (value <= absl::ZeroDuration() || value > kMaxDuration) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": expected a duration > 0 of at most 1000 h, got ", absl::FormatDuration(value)));
    }
  }
  if (limits.max_staging_slots < 0 || limits.max_staging_slots > INT32_MAX) {
    return absl::InvalidArgumentError(absl::StrCat("max_staging_slots: expected 0 to 2^31 - 1, got ", limits.max_staging_slots));
  }
  const std::pair<const char*, absl::Duration> of_grpc[] = {
      {"max_handshake_time", limits.max_handshake_time},
      {"max_connection_idle", limits.max_connection_idle},
      {"min_ping_interval", limits.min_ping_interval},
  };
  for (const auto& [name, value] : of_grpc) {
    if (value < absl::Milliseconds(1) || value > kMaxGrpcDuration) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": expected a duration from 1ms to 500h, got ", absl::FormatDuration(value)));
    }
  }
  const std::pair<const char*, int64_t> counted_in_31_bits[] = {
      {"max_stripes", limits.max_stripes},
      {"max_connections", limits.max_connections},
      {"max_connection_streams", limits.max_connection_streams},
      {"max_metadata_bytes", limits.max_metadata_bytes},
  };
  for (const auto& [name, value] : counted_in_31_bits) {
    if (value > kMostOfAll) return absl::InvalidArgumentError(absl::StrCat(name, ": expected at most 2^31 - 1, got ", value));
  }
  if (limits.max_message_bytes > INT_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_message_bytes: expected at most 2^31 - 1, which protobuf can carry, got ", limits.max_message_bytes));
  }
  if (limits.max_vocab_size > INT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_vocab_size: expected at most 2^31 - 1, because targets are int32, got ", limits.max_vocab_size));
  }
  if (limits.max_hidden_size > (limits.max_chunk_bytes / 4)) {
    return absl::InvalidArgumentError(absl::StrCat("max_chunk_bytes: expected room for one fp32 row of max_hidden_size ",
                                                   limits.max_hidden_size, ", got ", limits.max_chunk_bytes));
  }
  if (limits.max_chunk_bytes > limits.max_message_bytes - kMessageOverheadBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_message_bytes: expected at least max_chunk_bytes + 64 KiB = ", limits.max_chunk_bytes + kMessageOverheadBytes,
        ", got ", limits.max_message_bytes));
  }
  if (limits.max_micro_batch_rows > (limits.max_message_bytes - kMessageOverheadBytes) / kTokenOutputBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_message_bytes: expected room for five per-token outputs of max_micro_batch_rows ",
                     limits.max_micro_batch_rows, ", got ", limits.max_message_bytes));
  }
  return absl::OkStatus();
}

}  // namespace headwater::service
