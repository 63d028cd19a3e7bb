// Named limits of a server. Each is a flag of the same name and a field of headwater.v1.Limits (with `_s` behind it for a
// duration), where units are given.
#ifndef HEADWATER_SERVER_SERVICE_LIMITS_H_
#define HEADWATER_SERVER_SERVICE_LIMITS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace headwater::service {

struct Limits {
  int64_t max_message_bytes = 16 << 20;
  int64_t max_chunk_bytes = 4 << 20;
  int64_t max_micro_batch_rows = 1 << 18;
  int64_t max_micro_batch_bytes = int64_t{2} << 30;
  int64_t max_vocab_size = 1 << 24;
  int64_t max_hidden_size = 1 << 16;
  int64_t max_heads = 64;
  int64_t max_step_micro_batches = 1 << 16;
  int64_t max_staging_slots = 64;
  int64_t max_queue_depth = 64;
  int64_t max_in_flight_bytes = int64_t{8} << 30;
  int64_t max_upload_bytes = int64_t{8} << 30;
  int64_t max_sessions = 4096;
  absl::Duration max_session_lease = absl::Minutes(10);
  int64_t max_held_bytes = int64_t{4} << 30;
  int64_t max_waiting_calls = 64;
  absl::Duration max_step_wait = absl::Minutes(5);
  int64_t max_heads_per_tenant = 64;
  int64_t max_tenant_memory_bytes = 0;
  int64_t max_terms = 64;
  int64_t max_stripes = 16;
  absl::Duration max_stripe_wait = absl::Seconds(10);
  int64_t max_session_regions = 64;
  int64_t max_region_bytes = int64_t{64} << 30;
  int64_t max_join_bytes = int64_t{4} << 30;
  absl::Duration max_join_wait = absl::Minutes(1);
  // Of what carries the calls: bounds for clients that nobody has asked yet who they are.
  int64_t max_connections = 4096;
  int64_t max_connection_streams = 256;
  int64_t max_metadata_bytes = 8 << 10;
  int64_t max_health_watches = 256;
  absl::Duration max_stream_time = absl::Hours(1);
  absl::Duration max_handshake_time = absl::Seconds(10);
  absl::Duration max_connection_idle = absl::Minutes(10);
  absl::Duration min_ping_interval = absl::Seconds(5);
  int64_t ordered_window = 1024;
};

// Room in a message for everything that is not a chunk's data or a per-token output.
inline constexpr int64_t kMessageOverheadBytes = 64 << 10;

// What gRPC itself puts into a call's metadata, with room for a short token.
inline constexpr int64_t kLeastMetadataBytes = 1 << 10;

// InvalidArgument if a limit is below its minimum (1, or 0 where that means none; kLeastMetadataBytes), or if two of them
// contradict each other (a row must fit a chunk, a chunk and the per-token outputs of the largest micro-batch must fit a message).
absl::Status ValidateLimits(const Limits& limits);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LIMITS_H_
