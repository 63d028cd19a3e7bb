// Named limits of a server. Each is a flag of the same name and a field of headwater.v1.Limits, where units are given.
#ifndef HEADWATER_SERVER_SERVICE_LIMITS_H_
#define HEADWATER_SERVER_SERVICE_LIMITS_H_

#include <cstdint>

#include "absl/status/status.h"

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
};

// InvalidArgument if a limit is below 1, or if two of them contradict each other (a row must fit a chunk, a chunk and the per-token
// outputs of the largest micro-batch must fit a message).
absl::Status ValidateLimits(const Limits& limits);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LIMITS_H_
