#include "client/core/rows/transfer/chunk_wire.h"

#include "client/core/link/error.h"

namespace headwater::client::internal {

absl::StatusOr<DecodedResponse> DecodeResponse(const grpc::ByteBuffer& message) {
  DecodedResponse response;
  if (!message.Dump(&response.slices).ok()) return MakeAnswerError("a message that cannot be read");
  std::vector<v1::ByteSpan> spans;
  for (const grpc::Slice& slice : response.slices) spans.emplace_back(slice.begin(), slice.size());
  std::vector<v1::ByteSpan> summary;
  response.has_chunk = v1::ReadChunkMessage(spans, v1::ChunkField::kOfResponse, &response.chunk, &summary);
  if (response.has_chunk) return response;
  if (!summary.empty()) {
    std::string& bytes = response.summary.emplace();
    for (const v1::ByteSpan& span : summary) bytes.append(reinterpret_cast<const char*>(span.data()), span.size());
    return response;
  }
  // No message that an encoder makes, or an empty one.
  response.by_protobuf = std::make_unique<v1::ComputeLossResponse>();
  if (!response.by_protobuf->ParseFromString(StringOf(message))) return MakeAnswerError("a message that cannot be decoded");
  if (response.by_protobuf->has_summary()) response.summary = response.by_protobuf->summary().SerializeAsString();
  response.has_chunk = response.by_protobuf->has_chunk();
  const v1::RowChunk& chunk = response.by_protobuf->chunk();
  const v1::ByteSpan data(reinterpret_cast<const uint8_t*>(chunk.data().data()), chunk.data().size());
  response.chunk = {chunk.role(), chunk.term_index(), chunk.row_start(), chunk.row_count(), {}, static_cast<int64_t>(data.size())};
  if (!data.empty()) response.chunk.data.push_back(data);
  return response;
}

std::string StringOf(const grpc::ByteBuffer& message) {
  std::string bytes;
  std::vector<grpc::Slice> slices;
  if (!message.Valid() || !message.Dump(&slices).ok()) return bytes;
  bytes.reserve(message.Length());
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

}  // namespace headwater::client::internal
