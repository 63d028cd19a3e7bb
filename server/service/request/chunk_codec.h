// Chunks of rows on the wire, without protobuf and without copies. A received chunk is read in the slices that gRPC received. A
// sent one is a short prefix and a slice that refers to the rows where they lie.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_CHUNK_CODEC_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_CHUNK_CODEC_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "headwater/v1/loss_service.pb.h"
#include "proto/headwater/v1/row_chunk_wire.h"

namespace headwater::service {

using v1::ByteSpan;
using v1::ChunkView;

// One message as it was received. Movable.
class ReceivedMessage {
 public:
  explicit ReceivedMessage(grpc::ByteBuffer* buffer);
  // As ReadChunkMessage() of a request; `chunk` is valid as long as this is.
  bool ParseChunk(ChunkView* chunk) const { return ReadChunkMessage(spans_, v1::ChunkField::kOfRequest, chunk); }
  // By protobuf. kProtocolViolation if the bytes are no message of that type.
  absl::Status Parse(google::protobuf::MessageLite* message) const;

 private:
  std::vector<grpc::Slice> slices_;
  std::vector<ByteSpan> spans_;
};

// A ComputeLossResponse or TransferRowsResponse (which are the same bytes) with a chunk of grad_hidden. The message refers to
// [data, data + data_bytes), which `owner` keeps alive until gRPC has released it.
grpc::ByteBuffer EncodeGradChunk(int64_t row_start, int64_t row_count, const uint8_t* data, int64_t data_bytes,
                                 std::shared_ptr<const void> owner);

// Any message, copied.
grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_CHUNK_CODEC_H_
