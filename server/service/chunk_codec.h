// Chunks of rows on the wire, without protobuf and without copies: a received chunk is looked at in the slices that gRPC received,
// a sent one is a short prefix and a slice that refers to the rows where they lie.
#ifndef HEADWATER_SERVER_SERVICE_CHUNK_CODEC_H_
#define HEADWATER_SERVER_SERVICE_CHUNK_CODEC_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::service {

using ByteSpan = absl::Span<const uint8_t>;

// A headwater.v1.RowChunk whose data lies elsewhere.
struct ChunkView {
  int32_t role = 0;  // headwater.v1.ChunkRole, or any other number
  int32_t term_index = 0;
  int64_t row_start = 0;
  int64_t row_count = 0;
  std::vector<ByteSpan> data;  // in order; none is empty
  int64_t data_bytes = 0;
};

// Reads a ComputeLossRequest, TransferRowsRequest or StreamTeacherRequest, whose chunk has field number 2, from the bytes of
// `slices` one behind the other. True if it is a chunk, exactly as protobuf's own parser would read it; `chunk` points into the
// slices then. False for everything else, whether it is a message (a header, none at all, one with groups) or not: that is for
// protobuf's parser to tell.
bool ParseChunkMessage(absl::Span<const ByteSpan> slices, ChunkView* chunk);

// Copies the chunk's data to `out` (data_bytes bytes).
void CopyChunkData(const ChunkView& chunk, uint8_t* out);

// One message as it was received. Movable.
class ReceivedMessage {
 public:
  // Takes the slices out of `buffer`.
  explicit ReceivedMessage(grpc::ByteBuffer* buffer);
  // As ParseChunkMessage(); `chunk` is valid as long as this is.
  bool ParseChunk(ChunkView* chunk) const { return ParseChunkMessage(spans_, chunk); }
  // By protobuf. False if the bytes are no message of that type.
  bool Parse(google::protobuf::MessageLite* message) const;

 private:
  std::vector<grpc::Slice> slices_;
  std::vector<ByteSpan> spans_;
};

// A ComputeLossResponse or TransferRowsResponse (which are the same bytes) with a chunk of grad_hidden. The message refers to
// [data, data + data_bytes), which `owner` keeps alive until gRPC has let go of it.
grpc::ByteBuffer EncodeGradChunk(int64_t row_start, int64_t row_count, const uint8_t* data, int64_t data_bytes,
                                 std::shared_ptr<const void> owner);

// Any message, copied.
grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CHUNK_CODEC_H_
