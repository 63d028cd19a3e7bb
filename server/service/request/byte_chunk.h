// One chunk of a stream of bytes that a client sends.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_BYTE_CHUNK_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_BYTE_CHUNK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "headwater/v1/head_service.pb.h"
#include "server/observability/metrics.h"
#include "server/service/request/field_check.h"
#include "server/service/server_core.h"

namespace headwater::service {

// Checks the chunk as far as that needs to know nothing of its stream, and counts its bytes. kInvalidField, kLimitExceeded.
inline absl::Status CheckByteChunk(ServerCore& core, const v1::ByteChunk& chunk) {
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("chunk.offset_bytes", chunk.offset_bytes(), 0));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core.options.limits.max_chunk_bytes));
  core.metrics.CountBytes(observability::Direction::kIn, data_bytes);
  return absl::OkStatus();
}

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_BYTE_CHUNK_H_
