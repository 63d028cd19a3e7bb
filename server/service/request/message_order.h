// The messages of a client's stream: one header, first; then chunks.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/head_service.pb.h"
#include "server/observability/metrics.h"
#include "server/service/request/field_check.h"
#include "server/service/server_core.h"
#include "server/transport/growing_buffer.h"

namespace headwater::service {

// The first message, where it is read by itself: kProtocolViolation for a chunk, kMissingField for neither.
template <typename Message>
absl::Status CheckHeaderFirst(const Message& message) {
  if (message.has_header()) return absl::OkStatus();
  if (!message.has_chunk()) return MissingField("message", "a header first");
  return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "a chunk");
}

// A message after the header: kProtocolViolation for a second header, kMissingField for neither.
template <typename Message>
absl::Status CheckNextChunk(const Message& message) {
  if (message.has_chunk()) return absl::OkStatus();
  if (!message.has_header()) return MissingField("message", "a header or a chunk");
  return FieldError(ErrorReason::kProtocolViolation, "header", "one header, first", "a second header");
}

// The stream has ended without a header.
inline absl::Status NoHeader() {
  return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "the stream's end");
}

// Checks a chunk of bytes as far as that needs to know nothing of its stream, and counts its bytes. kInvalidField, kLimitExceeded.
inline absl::Status CheckByteChunk(ServerCore& core, const v1::ByteChunk& chunk) {
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("chunk.offset_bytes", chunk.offset_bytes(), 0));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core.options.limits.max_chunk_bytes));
  core.metrics.Count(observability::Metric::kBytes, data_bytes, observability::Direction::kIn);
  return absl::OkStatus();
}

// Appends the next bytes of `total_bytes` in all. kChunkOutOfRange unless they begin where the buffer ends, and fit. `what` they
// belong to, for the message of kMemoryBudgetExceeded.
inline absl::Status AppendBytes(transport::GrowingBuffer& buffer, int64_t offset, const std::string& data, int64_t total_bytes,
                                const char* what) {
  if (offset != buffer.size()) {
    return FieldError(ErrorReason::kChunkOutOfRange, "chunk.offset_bytes", absl::StrCat(buffer.size(), ", where the upload stands"),
                      absl::StrCat(offset));
  }
  const int64_t left = total_bytes - buffer.size();
  const int64_t data_bytes = static_cast<int64_t>(data.size());
  if (data_bytes < 1 || data_bytes > left) {
    return FieldError(ErrorReason::kChunkOutOfRange, "chunk.data",
                      absl::StrCat("1 to ", left, " bytes, which are left of the upload"), absl::StrCat(data_bytes, " bytes"));
  }
  if (buffer.Append(data.data(), data_bytes)) return absl::OkStatus();
  return MakeError(ErrorReason::kMemoryBudgetExceeded,
                   absl::StrCat("the host has no memory for ", data_bytes, " more bytes of ", what),
                   {{"requestedBytes", absl::StrCat(data_bytes)}});
}

// The stream has ended: kProtocolViolation if bytes are missing.
inline absl::Status CheckAllBytes(const transport::GrowingBuffer& buffer, int64_t total_bytes) {
  if (buffer.size() == total_bytes) return absl::OkStatus();
  return FieldError(ErrorReason::kProtocolViolation, "chunk", absl::StrCat(total_bytes, " bytes in all"),
                    absl::StrCat(buffer.size()));
}

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_
