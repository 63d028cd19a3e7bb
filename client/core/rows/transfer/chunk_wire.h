// Answers that carry rows, so that the rows themselves are copied out of them only once.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CHUNK_WIRE_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CHUNK_WIRE_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/v1/loss_service.pb.h"
#include "proto/headwater/v1/row_chunk_wire.h"

namespace headwater::client::internal {

// A response message (ComputeLossResponse or TransferRowsResponse): a chunk, or the summary, or neither. Move-only.
struct DecodedResponse {
  bool has_chunk = false;
  v1::ChunkView chunk{};                 // its data lies in this object's memory
  std::optional<std::string> summary{};  // serialized MicroBatchSummary

  std::vector<grpc::Slice> slices{};                       // the message
  std::unique_ptr<v1::ComputeLossResponse> by_protobuf{};  // where protobuf has read it
};

// INTERNAL if the bytes are no such message.
absl::StatusOr<DecodedResponse> DecodeResponse(const grpc::ByteBuffer& message);

// All bytes of a message; empty if it cannot be read.
std::string StringOf(const grpc::ByteBuffer& message);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CHUNK_WIRE_H_
