// The order of a client's messages: one header, first; then chunks.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_

#include "absl/status/status.h"
#include "headwater/kernels/error.h"
#include "server/service/request/field_check.h"

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
  switch (message.message_case()) {
    case Message::kHeader:
      return absl::OkStatus();
    case Message::kChunk:
      return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "a chunk");
    case Message::MESSAGE_NOT_SET:
      break;
  }
  return MissingField("message", "a header first");
}

// The stream has ended: kProtocolViolation unless there was a header.
inline absl::Status CheckHeaderSeen(bool header_seen) {
  if (header_seen) return absl::OkStatus();
  return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "the stream's end");
}

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_MESSAGE_ORDER_H_
