#include "client/core/rows/transfer/chunk_wire.h"

#include <algorithm>
#include <cstring>

#include "client/core/link/error.h"

namespace headwater::client::internal {
namespace {

constexpr int kVarint = 0;  // protobuf's wire types
constexpr int kBytes = 2;
constexpr uint8_t Tag(int field, int type) { return static_cast<uint8_t>(field << 3 | type); }

constexpr uint8_t kRequestChunk = Tag(2, kBytes);
constexpr uint8_t kResponseChunk = Tag(1, kBytes);
constexpr uint8_t kResponseSummary = Tag(2, kBytes);
constexpr uint8_t kRole = Tag(1, kVarint);
constexpr uint8_t kTermIndex = Tag(2, kVarint);
constexpr uint8_t kRowStart = Tag(3, kVarint);
constexpr uint8_t kRowCount = Tag(4, kVarint);
constexpr uint8_t kData = Tag(15, kBytes);
// Protobuf takes no longer lengths.
constexpr size_t kMaxLengthBytes = 5;
// All that comes before a chunk's data takes less.
constexpr int64_t kPrefixBytes = 64;

void AppendVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void AppendField(uint8_t tag, int64_t value, std::string& out) {
  if (value == 0) return;  // proto3's default
  out.push_back(static_cast<char>(tag));
  AppendVarint(static_cast<uint64_t>(value), out);
}

// Reads the beginning of a message. Every function is false where that ends.
class PrefixReader {
 public:
  explicit PrefixReader(const SlicedMessage& message)
      : message_bytes_(message.size()), prefix_(message.Substring(0, std::min(message.size(), kPrefixBytes))) {}

  int64_t offset() const { return static_cast<int64_t>(offset_); }

  bool ReadByte(uint8_t& byte) {
    if (offset_ == prefix_.size()) return false;
    byte = static_cast<uint8_t>(prefix_[offset_++]);
    return true;
  }

  bool ReadVarint(uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      uint8_t byte = 0;
      if (!ReadByte(byte)) return false;
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;  // bits beyond 64 are dropped, as protobuf does
      if ((byte & 0x80) == 0) return true;
    }
    return false;
  }

  // The length of a field that ends where the message does.
  bool ReadLastLength(int64_t& length) {
    uint64_t value = 0;
    const size_t before = offset_;
    if (!ReadVarint(value) || offset_ - before > kMaxLengthBytes) return false;
    length = message_bytes_ - offset();
    return value == static_cast<uint64_t>(length);
  }

 private:
  const int64_t message_bytes_;
  const std::string prefix_;
  size_t offset_ = 0;
};

// True for what encoders make: a chunk whose last field is its data, or a summary, and nothing beside it.
bool ReadUsual(const SlicedMessage& message, DecodedResponse& response) {
  PrefixReader reader(message);
  uint8_t tag = 0;
  int64_t length = 0;
  if (!reader.ReadByte(tag) || !reader.ReadLastLength(length)) return false;
  if (tag == kResponseSummary) {
    response.summary = message.Substring(reader.offset(), length);
    return true;
  }
  response.has_chunk = tag == kResponseChunk;
  while (response.has_chunk && reader.ReadByte(tag)) {
    if (tag == kData) {
      if (!reader.ReadLastLength(response.rows_bytes)) return false;
      response.rows_offset = reader.offset();
      return true;
    }
    uint64_t value = 0;
    if (!reader.ReadVarint(value)) return false;
    if (tag == kRole) {
      response.chunk.role = static_cast<v1::ChunkRole>(static_cast<int32_t>(value));
    } else if (tag == kTermIndex) {
      response.chunk.term_index = static_cast<int32_t>(value);
    } else if (tag == kRowStart) {
      response.chunk.row_start = static_cast<int64_t>(value);
    } else if (tag == kRowCount) {
      response.chunk.row_count = static_cast<int64_t>(value);
    } else {
      return false;
    }
  }
  return false;
}

}  // namespace

std::string EncodeChunkPrefix(const ChunkHeader& header, int64_t payload_bytes) {
  std::string fields;
  AppendField(kRole, header.role, fields);
  AppendField(kTermIndex, header.term_index, fields);
  AppendField(kRowStart, header.row_start, fields);
  AppendField(kRowCount, header.row_count, fields);
  fields.push_back(static_cast<char>(kData));
  AppendVarint(static_cast<uint64_t>(payload_bytes), fields);
  std::string prefix(1, static_cast<char>(kRequestChunk));
  AppendVarint(fields.size() + static_cast<uint64_t>(payload_bytes), prefix);
  return prefix + fields;
}

bool SlicedMessage::Assign(const grpc::ByteBuffer& buffer) {
  slices_.clear();
  size_ = 0;
  if (!buffer.Dump(&slices_).ok()) return false;
  for (const grpc::Slice& slice : slices_) size_ += static_cast<int64_t>(slice.size());
  return true;
}

void SlicedMessage::CopyTo(int64_t offset, int64_t bytes, void* to) const {
  auto* out = static_cast<unsigned char*>(to);
  for (const grpc::Slice& slice : slices_) {
    if (bytes == 0) return;
    const int64_t size = static_cast<int64_t>(slice.size());
    if (offset >= size) {
      offset -= size;
      continue;
    }
    const int64_t step = std::min(size - offset, bytes);
    std::memcpy(out, slice.begin() + offset, static_cast<size_t>(step));
    out += step;
    bytes -= step;
    offset = 0;
  }
}

std::string SlicedMessage::Substring(int64_t offset, int64_t bytes) const {
  std::string result(static_cast<size_t>(bytes), '\0');
  CopyTo(offset, bytes, result.data());
  return result;
}

void DecodedResponse::CopyRowsTo(const SlicedMessage& message, void* to) const {
  if (own_rows.empty()) {
    message.CopyTo(rows_offset, rows_bytes, to);
  } else {
    std::memcpy(to, own_rows.data(), own_rows.size());
  }
}

absl::StatusOr<DecodedResponse> DecodeResponse(const SlicedMessage& message) {
  DecodedResponse response;
  if (ReadUsual(message, response)) return response;
  response = {};
  v1::ComputeLossResponse parsed;
  if (!parsed.ParseFromString(message.Substring(0, message.size()))) return MakeAnswerError("a message that cannot be decoded");
  if (parsed.has_summary()) response.summary = parsed.summary().SerializeAsString();
  response.has_chunk = parsed.has_chunk();
  const v1::RowChunk& chunk = parsed.chunk();
  response.chunk = {chunk.role(), chunk.term_index(), chunk.row_start(), chunk.row_count()};
  response.own_rows = chunk.data();
  response.rows_bytes = static_cast<int64_t>(response.own_rows.size());
  return response;
}

}  // namespace headwater::client::internal
