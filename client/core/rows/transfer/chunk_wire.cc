#include "client/core/rows/transfer/chunk_wire.h"

#include <algorithm>
#include <cstring>

#include "client/core/link/error.h"

namespace headwater::client::internal {
namespace {

// Protobuf's wire types.
enum class WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kGroupStart = 3, kGroupEnd = 4, kFixed32 = 5 };

constexpr int kRequestChunkField = 2;
constexpr int kResponseChunkField = 1;
constexpr int kResponseSummaryField = 2;
constexpr int kRoleField = 1;
constexpr int kTermIndexField = 2;
constexpr int kRowStartField = 3;
constexpr int kRowCountField = 4;
constexpr int kDataField = 15;
// Protobuf's own limits: of groups and messages in one another, and of a tag or a length.
constexpr int kMaxDepth = 100;
constexpr int64_t kMaxTagBytes = 5;

void AppendVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void AppendTag(int field, WireType type, std::string& out) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(type), out);
}

void AppendVarintField(int field, int64_t value, std::string& out) {
  if (value == 0) return;  // proto3's default
  AppendTag(field, WireType::kVarint, out);
  AppendVarint(static_cast<uint64_t>(value), out);
}

size_t VarintSize(uint64_t value) {
  size_t size = 1;
  for (; value >= 0x80; value >>= 7) ++size;
  return size;
}

// Reads on from an offset of a sliced message. Every function is false where the bytes end or say nonsense.
class WireReader {
 public:
  explicit WireReader(const std::vector<grpc::Slice>& slices) : slices_(slices) {}

  int64_t offset() const { return offset_; }

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

  // As protobuf reads one: in at most five bytes, of which bits beyond 32 are dropped.
  bool ReadTag(int& field, WireType& type) {
    uint64_t value = 0;
    const int64_t before = offset_;
    if (!ReadVarint(value) || offset_ - before > kMaxTagBytes) return false;
    const auto tag = static_cast<uint32_t>(value);
    if ((tag >> 3) == 0 || (tag & 7) > 5) return false;
    field = static_cast<int>(tag >> 3);
    type = static_cast<WireType>(tag & 7);
    return true;
  }

  // The length of what follows, which lies before `end`. Protobuf takes no more than five bytes for one.
  bool ReadLength(int64_t end, int64_t& length) {
    uint64_t value = 0;
    const int64_t before = offset_;
    if (!ReadVarint(value) || offset_ - before > kMaxTagBytes || offset_ > end || value > static_cast<uint64_t>(end - offset_))
      return false;
    length = static_cast<int64_t>(value);
    return true;
  }

  bool Skip(int64_t bytes) {
    while (bytes > 0) {
      if (slice_ == slices_.size()) return false;
      const int64_t left = static_cast<int64_t>(slices_[slice_].size() - in_slice_);
      const int64_t step = std::min(left, bytes);
      in_slice_ += static_cast<size_t>(step);
      offset_ += step;
      bytes -= step;
      if (in_slice_ == slices_[slice_].size()) NextSlice();
    }
    return true;
  }

  bool SkipField(int field, WireType type, int64_t end, int depth = 0) {
    uint64_t ignored = 0;
    int64_t length = 0;
    switch (type) {
      case WireType::kVarint:
        return ReadVarint(ignored);
      case WireType::kFixed64:
        return Skip(8);
      case WireType::kFixed32:
        return Skip(4);
      case WireType::kBytes:
        return ReadLength(end, length) && Skip(length);
      case WireType::kGroupStart: {
        if (depth == kMaxDepth) return false;
        for (;;) {
          int inner_field = 0;
          WireType inner_type = WireType::kVarint;
          if (offset_ >= end || !ReadTag(inner_field, inner_type)) return false;
          if (inner_type == WireType::kGroupEnd) return inner_field == field;
          if (!SkipField(inner_field, inner_type, end, depth + 1)) return false;
        }
      }
      case WireType::kGroupEnd:
        return false;
    }
    return false;
  }

 private:
  bool ReadByte(uint8_t& byte) {
    while (slice_ < slices_.size() && in_slice_ == slices_[slice_].size()) NextSlice();
    if (slice_ == slices_.size()) return false;
    byte = slices_[slice_].begin()[in_slice_];
    ++in_slice_;
    ++offset_;
    return true;
  }
  void NextSlice() {
    ++slice_;
    in_slice_ = 0;
  }

  const std::vector<grpc::Slice>& slices_;
  size_t slice_ = 0;
  size_t in_slice_ = 0;
  int64_t offset_ = 0;
};

// The fields of a RowChunk that ends at `end`. Called again for a chunk that comes in pieces: later fields replace earlier ones.
bool ReadChunk(WireReader& reader, int64_t end, DecodedResponse& response) {
  while (reader.offset() < end) {
    int field = 0;
    WireType type = WireType::kVarint;
    if (!reader.ReadTag(field, type)) return false;
    uint64_t value = 0;
    if (field >= kRoleField && field <= kRowCountField && type == WireType::kVarint) {
      if (!reader.ReadVarint(value)) return false;
      if (field == kRoleField) response.chunk.role = static_cast<v1::ChunkRole>(static_cast<int32_t>(value));
      if (field == kTermIndexField) response.chunk.term_index = static_cast<int32_t>(value);
      if (field == kRowStartField) response.chunk.row_start = static_cast<int64_t>(value);
      if (field == kRowCountField) response.chunk.row_count = static_cast<int64_t>(value);
    } else if (field == kDataField && type == WireType::kBytes) {
      int64_t length = 0;
      if (!reader.ReadLength(end, length)) return false;
      response.rows = {reader.offset(), length};
      if (!reader.Skip(length)) return false;
    } else if (!reader.SkipField(field, type, end, /*depth=*/1)) {
      return false;
    }
  }
  return reader.offset() == end;
}

bool ReadResponse(const SlicedMessage& message, DecodedResponse& response) {
  WireReader reader(message.slices());
  while (reader.offset() < message.size()) {
    int field = 0;
    WireType type = WireType::kVarint;
    if (!reader.ReadTag(field, type)) return false;
    const bool is_part = type == WireType::kBytes && (field == kResponseChunkField || field == kResponseSummaryField);
    if (!is_part) {
      if (!reader.SkipField(field, type, message.size())) return false;
      continue;
    }
    int64_t length = 0;
    if (!reader.ReadLength(message.size(), length)) return false;
    if (field == kResponseSummaryField) {
      // One of the two, the last one; a summary in pieces is not one that any encoder makes.
      response = {};
      response.summary = MessagePart{reader.offset(), length};
      if (!reader.Skip(length)) return false;
    } else {
      response.summary.reset();
      response.has_chunk = true;
      if (!ReadChunk(reader, reader.offset() + length, response)) return false;
    }
  }
  return true;
}

}  // namespace

std::string EncodeChunkPrefix(const ChunkHeader& header, int64_t payload_bytes) {
  std::string fields;
  AppendVarintField(kRoleField, header.role, fields);
  AppendVarintField(kTermIndexField, header.term_index, fields);
  AppendVarintField(kRowStartField, header.row_start, fields);
  AppendVarintField(kRowCountField, header.row_count, fields);
  AppendTag(kDataField, WireType::kBytes, fields);
  AppendVarint(static_cast<uint64_t>(payload_bytes), fields);
  std::string prefix;
  prefix.reserve(fields.size() + 1 + VarintSize(fields.size() + static_cast<uint64_t>(payload_bytes)));
  AppendTag(kRequestChunkField, WireType::kBytes, prefix);
  AppendVarint(fields.size() + static_cast<uint64_t>(payload_bytes), prefix);
  prefix += fields;
  return prefix;
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

absl::StatusOr<DecodedResponse> DecodeResponse(const SlicedMessage& message) {
  DecodedResponse response;
  if (!ReadResponse(message, response)) return MakeAnswerError("a message that cannot be decoded");
  return response;
}

}  // namespace headwater::client::internal
