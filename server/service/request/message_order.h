// The messages of a client's stream: one header, first; then chunks.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/head_service.pb.h"
#include "server/observability/metrics.h"
#include "server/service/request/field_check.h"
#include "server/service/server_core.h"

namespace headwater::service {

// Hands `message` to `on_header(header)` or `on_chunk(mutable chunk)`; kProtocolViolation for a second header or a chunk before it.
template <typename Message, typename OnHeader, typename OnChunk>
absl::Status TakeInOrder(Message* message, bool header_seen, OnHeader&& on_header, OnChunk&& on_chunk) {
  switch (message->message_case()) {
    case Message::kHeader:
      if (header_seen) return FieldError(ErrorReason::kProtocolViolation, "header", "one header, first", "a second header");
      return on_header(message->header());
    case Message::kChunk:
      if (!header_seen) return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "a chunk");
      return on_chunk(message->mutable_chunk());
    case Message::MESSAGE_NOT_SET:
      break;
  }
  return MissingField("message", "a header or a chunk");
}

// The first message, where it is read by itself: kProtocolViolation for a chunk, kMissingField for neither.
template <typename Message>
absl::Status CheckHeaderFirst(const Message& message) {
  if (message.has_header()) return absl::OkStatus();
  if (!message.has_chunk()) return MissingField("message", "a header first");
  return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "a chunk");
}

// The stream has ended: kProtocolViolation unless there was a header.
inline absl::Status CheckHeaderSeen(bool header_seen) {
  if (header_seen) return absl::OkStatus();
  return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "the stream's end");
}

// Checks a chunk of bytes as far as that needs to know nothing of its stream, and counts its bytes. kInvalidField, kLimitExceeded.
inline absl::Status CheckByteChunk(ServerCore& core, const v1::ByteChunk& chunk) {
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("chunk.offset_bytes", chunk.offset_bytes(), 0));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core.options.limits.max_chunk_bytes));
  core.metrics.CountBytes(observability::Direction::kIn, data_bytes);
  return absl::OkStatus();
}

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_
