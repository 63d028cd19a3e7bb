// Messages that carry rows. What encoders make of them is encoded and decoded by hand, so that the rows themselves are neither
// copied into a message nor out of one more than once; any other form is left to protobuf.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CHUNK_WIRE_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CHUNK_WIRE_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

// What a RowChunk says beside its rows.
struct ChunkHeader {
  v1::ChunkRole role = v1::CHUNK_ROLE_UNSPECIFIED;
  int64_t term_index = 0;
  int64_t row_start = 0;
  int64_t row_count = 0;
};

// A request message (ComputeLossRequest, TransferRowsRequest or StreamTeacherRequest) with a chunk, up to its payload of
// `payload_bytes`, which must follow.
std::string EncodeChunkPrefix(const ChunkHeader& header, int64_t payload_bytes);

// A message that lies in several slices.
class SlicedMessage {
 public:
  // False if the buffer cannot be read.
  bool Assign(const grpc::ByteBuffer& buffer);

  int64_t size() const { return size_; }
  // REQUIRES: [offset, offset + bytes) lies within the message.
  void CopyTo(int64_t offset, int64_t bytes, void* to) const;
  std::string Substring(int64_t offset, int64_t bytes) const;

 private:
  std::vector<grpc::Slice> slices_;
  int64_t size_ = 0;
};

// A response message (ComputeLossResponse or TransferRowsResponse): a chunk, or the summary, or neither.
struct DecodedResponse {
  bool has_chunk = false;
  ChunkHeader chunk;
  int64_t rows_bytes = 0;                // of the chunk's data
  std::optional<std::string> summary{};  // serialized MicroBatchSummary

  // The chunk's data, of the message that this was decoded from.
  void CopyRowsTo(const SlicedMessage& message, void* to) const;

  int64_t rows_offset = 0;  // of the data in the message
  std::string own_rows{};   // the data itself, where protobuf has read it
};

// INTERNAL if the bytes are no such message.
absl::StatusOr<DecodedResponse> DecodeResponse(const SlicedMessage& message);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CHUNK_WIRE_H_
