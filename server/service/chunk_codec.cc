#include "server/service/chunk_codec.h"

#include <google/protobuf/io/zero_copy_stream.h>

#include <algorithm>
#include <climits>
#include <utility>

namespace headwater::service {
namespace {

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
  const v1::ChunkView header = {
      .role = v1::CHUNK_ROLE_GRAD_HIDDEN, .row_start = row_start, .row_count = row_count, .data_bytes = data_bytes};
  auto kept = std::make_unique<Owner>(std::move(owner));
  const grpc::Slice slices[] = {
      grpc::Slice(v1::ChunkMessagePrefix(v1::ChunkField::kOfResponse, header)),
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
