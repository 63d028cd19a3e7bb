#include "proto/headwater/v1/row_chunk_wire.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace headwater::v1 {
namespace {

// Wire types of protobuf.
constexpr uint32_t kVarint = 0;
constexpr uint32_t kFixed64 = 1;
constexpr uint32_t kDelimited = 2;
constexpr uint32_t kFixed32 = 5;

constexpr uint32_t Tag(uint32_t field, uint32_t wire_type) { return field << 3 | wire_type; }

// A place in bytes that lie in several slices.
class Cursor {
 public:
  explicit Cursor(absl::Span<const ByteSpan> slices) : slices_(slices) {
    for (const ByteSpan& slice : slices) left_ += static_cast<int64_t>(slice.size());
  }

  // Bytes before the end, or before the limit that was set.
  int64_t left() const { return left_; }
  // Lowers left() to `bytes` (<= left()); Unlimit() restores the rest.
  int64_t Limit(int64_t bytes) { return std::exchange(left_, bytes) - bytes; }
  void Unlimit(int64_t bytes) { left_ += bytes; }

  bool ReadByte(uint8_t* byte) {
    if (left_ == 0) return false;
    SkipEmpty();
    *byte = slices_[slice_][offset_++];
    --left_;
    return true;
  }
  // At most ten bytes; bits beyond the 64th are dropped, as protobuf drops them.
  bool ReadVarint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      uint8_t byte = 0;
      if (!ReadByte(&byte)) return false;
      *value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }
  // Reads a tag with a field number above 0, in at most five bytes and 32 bits; other tags are left to protobuf's parser.
  bool ReadTag(uint32_t* tag) {
    uint64_t value = 0;
    const int64_t before = left_;
    if (!ReadVarint(&value) || before - left_ > 5 || value > UINT32_MAX) return false;
    *tag = static_cast<uint32_t>(value);
    return *tag >> 3 != 0;
  }
  // A length that lies within left().
  bool ReadLength(int64_t* length) {
    uint64_t value = 0;
    const int64_t before = left_;
    if (!ReadVarint(&value) || before - left_ > 5 || value > static_cast<uint64_t>(left_)) return false;
    *length = static_cast<int64_t>(value);
    return true;
  }
  // `bytes` <= left(). With `spans`, appends where they lie.
  void Skip(int64_t bytes, std::vector<ByteSpan>* spans = nullptr) {
    left_ -= bytes;
    while (bytes > 0) {
      SkipEmpty();
      const int64_t here = std::min(bytes, static_cast<int64_t>(slices_[slice_].size() - offset_));
      if (spans != nullptr) spans->push_back(slices_[slice_].subspan(offset_, static_cast<size_t>(here)));
      offset_ += static_cast<size_t>(here);
      bytes -= here;
    }
  }
  // The value of a field that is not known, or not of the type that is known.
  bool SkipValue(uint32_t tag) {
    uint64_t ignored = 0;
    int64_t length = 0;
    switch (tag & 7) {
      case kVarint:
        return ReadVarint(&ignored);
      case kFixed64:
        length = 8;
        break;
      case kDelimited:
        if (!ReadLength(&length)) return false;
        break;
      case kFixed32:
        length = 4;
        break;
      default:
        return false;  // groups and unknown wire types
    }
    if (length > left_) return false;
    Skip(length);
    return true;
  }

 private:
  void SkipEmpty() {
    while (offset_ == slices_[slice_].size()) {
      ++slice_;
      offset_ = 0;
    }
  }

  const absl::Span<const ByteSpan> slices_;
  size_t slice_ = 0;
  size_t offset_ = 0;
  int64_t left_ = 0;
};

// Up to the cursor's limit; fields that come twice count as they came last.
bool ParseChunkFields(Cursor& cursor, ChunkView* chunk) {
  while (cursor.left() > 0) {
    uint32_t tag = 0;
    if (!cursor.ReadTag(&tag)) return false;
    uint64_t value = 0;
    switch (tag) {
      case Tag(1, kVarint):
      case Tag(2, kVarint):
      case Tag(3, kVarint):
      case Tag(4, kVarint):
        if (!cursor.ReadVarint(&value)) return false;
        break;
      case Tag(15, kDelimited): {
        int64_t length = 0;
        if (!cursor.ReadLength(&length)) return false;
        chunk->data.clear();
        chunk->data_bytes = length;
        cursor.Skip(length, &chunk->data);
        continue;
      }
      default:
        if (!cursor.SkipValue(tag)) return false;
        continue;
    }
    switch (tag >> 3) {
      case 1:
        chunk->role = static_cast<int32_t>(value);
        break;
      case 2:
        chunk->term_index = static_cast<int32_t>(value);
        break;
      case 3:
        chunk->row_start = static_cast<int64_t>(value);
        break;
      default:
        chunk->row_count = static_cast<int64_t>(value);
        break;
    }
  }
  return true;
}

void AppendVarint(uint64_t value, std::string* out) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

void AppendField(uint32_t number, int64_t value, std::string* out) {
  if (value == 0) return;  // proto3's default
  AppendVarint(Tag(number, kVarint), out);
  AppendVarint(static_cast<uint64_t>(value), out);
}

}  // namespace

bool ReadChunkMessage(absl::Span<const ByteSpan> slices, ChunkField field, ChunkView* chunk, std::vector<ByteSpan>* other) {
  const uint32_t chunk_number = static_cast<uint32_t>(field);
  *chunk = ChunkView();
  Cursor cursor(slices);
  const int64_t all = cursor.left();
  bool found = false;
  while (cursor.left() > 0) {
    const bool first = cursor.left() == all;
    uint32_t tag = 0;
    int64_t length = 0;
    if (!cursor.ReadTag(&tag)) return false;
    if (tag == Tag(3 - chunk_number, kDelimited)) {
      if (other != nullptr && first && cursor.ReadLength(&length) && length == cursor.left()) cursor.Skip(length, other);
      return false;
    }
    if (tag != Tag(chunk_number, kDelimited)) {
      if (!cursor.SkipValue(tag)) return false;
      continue;
    }
    if (!cursor.ReadLength(&length)) return false;
    found = true;
    const int64_t beyond = cursor.Limit(length);
    if (!ParseChunkFields(cursor, chunk)) return false;
    cursor.Unlimit(beyond);
  }
  return found;
}

void CopySpans(absl::Span<const ByteSpan> spans, uint8_t* out) {
  for (const ByteSpan& span : spans) {
    std::memcpy(out, span.data(), span.size());
    out += span.size();
  }
}

std::string ChunkMessagePrefix(ChunkField field, const ChunkView& header) {
  std::string fields;
  AppendField(1, header.role, &fields);
  AppendField(2, header.term_index, &fields);
  AppendField(3, header.row_start, &fields);
  AppendField(4, header.row_count, &fields);
  AppendVarint(Tag(15, kDelimited), &fields);
  AppendVarint(static_cast<uint64_t>(header.data_bytes), &fields);
  std::string prefix;
  AppendVarint(Tag(static_cast<uint32_t>(field), kDelimited), &prefix);
  AppendVarint(fields.size() + static_cast<uint64_t>(header.data_bytes), &prefix);
  return prefix + fields;
}

}  // namespace headwater::v1
