// Hand-written reader and writer of messages that carry rows. A received chunk is read in the slices that it came in; a sent chunk
// is a short prefix before the rows in place.
#ifndef HEADWATER_PROTO_HEADWATER_V1_ROW_CHUNK_WIRE_H_
#define HEADWATER_PROTO_HEADWATER_V1_ROW_CHUNK_WIRE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace headwater::v1 {

using ByteSpan = absl::Span<const uint8_t>;

// A RowChunk whose data lies elsewhere.
struct ChunkView {
  int32_t role = 0;  // ChunkRole, or any other number
  int32_t term_index = 0;
  int64_t row_start = 0;
  int64_t row_count = 0;
  std::vector<ByteSpan> data{};  // in order; none is empty
  int64_t data_bytes = 0;
};

// Where a message has its chunk. Field 1 of requests is the header, field 2 of responses the summary.
enum class ChunkField : uint32_t { kOfResponse = 1, kOfRequest = 2 };

// Reads a ComputeLossRequest, TransferRowsRequest or StreamTeacherRequest, or a ComputeLossResponse or TransferRowsResponse, from
// the bytes of `slices` one behind the other. True if it is a chunk, exactly as protobuf's own parser would read it; `chunk` points
// into the slices then. False for everything else, valid message (a header, a summary, an empty message, one with groups) or not;
// protobuf's parser then decides. If the message is its header or summary and nothing else, `other` gets the bytes of that.
bool ReadChunkMessage(absl::Span<const ByteSpan> slices, ChunkField field, ChunkView* chunk,
                      std::vector<ByteSpan>* other = nullptr);

// Copies the spans to `out`, one behind the other.
void CopySpans(absl::Span<const ByteSpan> spans, uint8_t* out);

// A message with a chunk, up to its `header.data_bytes` bytes of data, which must follow.
std::string ChunkMessagePrefix(ChunkField field, const ChunkView& header);

}  // namespace headwater::v1

#endif  // HEADWATER_PROTO_HEADWATER_V1_ROW_CHUNK_WIRE_H_
