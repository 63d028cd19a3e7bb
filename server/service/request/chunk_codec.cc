#include "server/service/request/chunk_codec.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::service {

ReceivedMessage::ReceivedMessage(grpc::ByteBuffer* buffer) {
  if (!buffer->Dump(&slices_).ok()) slices_.clear();  // an empty buffer; or none was received
  buffer->Clear();
  spans_.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) spans_.emplace_back(slice.begin(), slice.size());
}

absl::Status ReceivedMessage::Parse(google::protobuf::MessageLite* message) const {
  grpc::ByteBuffer buffer(slices_.data(), slices_.size());  // refers to them
  grpc::ProtoBufferReader reader(&buffer);
  if (reader.status().ok() && message->ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return FieldError(ErrorReason::kProtocolViolation, "message", "a message of the API", "other bytes");
}

grpc::ByteBuffer EncodeGradChunk(int64_t row_start, int64_t row_count, const uint8_t* data, int64_t data_bytes,
                                 std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  const v1::ChunkView header = {
      .role = v1::CHUNK_ROLE_GRAD_HIDDEN, .row_start = row_start, .row_count = row_count, .data_bytes = data_bytes};
  auto kept = std::make_unique<Owner>(std::move(owner));
  const grpc::Slice slices[] = {
      grpc::Slice(v1::ChunkMessagePrefix(v1::ChunkField::kOfResponse, header)),
      // gRPC takes a pointer to non-const bytes, but writes nothing.
      grpc::Slice(
          const_cast<uint8_t*>(data), static_cast<size_t>(data_bytes),
          [](void* owner_pointer) { delete static_cast<Owner*>(owner_pointer); }, kept.get()),
  };
  static_cast<void>(kept.release());
  return grpc::ByteBuffer(slices, 2);
}

grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message) {
  grpc::Slice slice(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slice.begin()));
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace headwater::service
