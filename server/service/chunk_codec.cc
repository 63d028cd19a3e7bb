#include "server/service/chunk_codec.h"

#include <google/protobuf/io/zero_copy_stream.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>
#include <utility>

namespace headwater::service {
namespace {

// Wire types of protobuf.
constexpr uint32_t kVarint = 0;
constexpr uint32_t kFixed64 = 1;
constexpr uint32_t kDelimited = 2;
constexpr uint32_t kFixed32 = 5;

constexpr uint32_t Tag(uint32_t field, uint32_t wire_type) { return field << 3 | wire_type; }

constexpr uint32_t kHeaderField = 1;
constexpr uint32_t kChunkField = 2;

// A place in bytes that lie in several slices.
class Cursor {
 public:
  explicit Cursor(absl::Span<const ByteSpan> slices) : slices_(slices) {
    for (const ByteSpan& slice : slices) left_ += static_cast<int64_t>(slice.size());
  }

  // Bytes before the end, or before the limit that was set.
  int64_t left() const { return left_; }
  // Lowers left() to `bytes` (<= left()); what was beyond is given back by Unlimit().
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
  // A tag that this parser goes on with: of a field number above 0, in at most five bytes and 32 bits.
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
        return false;  // groups, and what is no wire type
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

// Of a message with a chunk of grad_hidden, the bytes before its data.
std::string GradChunkPrefix(int64_t row_start, int64_t row_count, int64_t data_bytes) {
  std::string fields;
  fields.push_back(static_cast<char>(Tag(1, kVarint)));
  AppendVarint(v1::CHUNK_ROLE_GRAD_HIDDEN, &fields);
  if (row_start != 0) {
    fields.push_back(static_cast<char>(Tag(3, kVarint)));
    AppendVarint(static_cast<uint64_t>(row_start), &fields);
  }
  fields.push_back(static_cast<char>(Tag(4, kVarint)));
  AppendVarint(static_cast<uint64_t>(row_count), &fields);
  fields.push_back(static_cast<char>(Tag(15, kDelimited)));
  AppendVarint(static_cast<uint64_t>(data_bytes), &fields);
  std::string prefix;
  prefix.push_back(static_cast<char>(Tag(1, kDelimited)));
  AppendVarint(fields.size() + static_cast<uint64_t>(data_bytes), &prefix);
  return prefix + fields;
}

// protobuf's view of slices; nothing is copied.
class SliceStream final : public google::protobuf::io::ZeroCopyInputStream {
 public:
  explicit SliceStream(absl::Span<const ByteSpan> slices) : slices_(slices) {}

  bool Next(const void** data, int* size) override {
    while (next_ < slices_.size() && offset_ == slices_[next_].size()) {
      ++next_;
      offset_ = 0;
    }
    if (next_ == slices_.size()) return false;
    const size_t here = std::min<size_t>(slices_[next_].size() - offset_, INT_MAX);
    *data = slices_[next_].data() + offset_;
    *size = static_cast<int>(here);
    offset_ += here;
    byte_count_ += static_cast<int64_t>(here);
    return true;
  }
  void BackUp(int count) override {
    offset_ -= static_cast<size_t>(count);
    byte_count_ -= count;
  }
  bool Skip(int count) override {
    const void* data = nullptr;
    int size = 0;
    while (count > 0) {
      if (!Next(&data, &size)) return false;
      if (size > count) {
        BackUp(size - count);
        size = count;
      }
      count -= size;
    }
    return true;
  }
  int64_t ByteCount() const override { return byte_count_; }

 private:
  const absl::Span<const ByteSpan> slices_;
  size_t next_ = 0;
  size_t offset_ = 0;
  int64_t byte_count_ = 0;
};

}  // namespace

bool ParseChunkMessage(absl::Span<const ByteSpan> slices, ChunkView* chunk) {
  *chunk = ChunkView();
  Cursor cursor(slices);
  bool found = false;
  while (cursor.left() > 0) {
    uint32_t tag = 0;
    if (!cursor.ReadTag(&tag) || tag == Tag(kHeaderField, kDelimited)) return false;
    if (tag != Tag(kChunkField, kDelimited)) {
      if (!cursor.SkipValue(tag)) return false;
      continue;
    }
    int64_t length = 0;
    if (!cursor.ReadLength(&length)) return false;
    found = true;
    const int64_t beyond = cursor.Limit(length);
    if (!ParseChunkFields(cursor, chunk)) return false;
    cursor.Unlimit(beyond);
  }
  return found;
}

void CopyChunkData(const ChunkView& chunk, uint8_t* out) {
  for (const ByteSpan& span : chunk.data) {
    std::memcpy(out, span.data(), span.size());
    out += span.size();
  }
}

ReceivedMessage::ReceivedMessage(grpc::ByteBuffer* buffer) {
  if (!buffer->Dump(&slices_).ok()) slices_.clear();  // an empty buffer; or none was received
  buffer->Clear();
  spans_.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) spans_.emplace_back(slice.begin(), slice.size());
}

bool ReceivedMessage::Parse(google::protobuf::MessageLite* message) const {
  SliceStream stream(spans_);
  return message->ParseFromZeroCopyStream(&stream);
}

grpc::ByteBuffer EncodeGradChunk(int64_t row_start, int64_t row_count, const uint8_t* data, int64_t data_bytes,
                                 std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  auto kept = std::make_unique<Owner>(std::move(owner));
  const grpc::Slice slices[] = {
      grpc::Slice(GradChunkPrefix(row_start, row_count, data_bytes)),
      // gRPC wants a pointer to what it could write to; it does not.
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
