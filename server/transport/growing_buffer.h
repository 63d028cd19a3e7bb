// GrowingBuffer: uninitialised bytes that grow as data comes, so that no length field of a client ever sizes an allocation.
#ifndef HEADWATER_SERVER_TRANSPORT_GROWING_BUFFER_H_
#define HEADWATER_SERVER_TRANSPORT_GROWING_BUFFER_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace headwater::transport {

class GrowingBuffer {
 public:
  // Never holds more than `limit_bytes` (>= 0). Allocates nothing yet.
  explicit GrowingBuffer(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Appends `byte_count` bytes. Returns false, without a change, above the limit or without memory. Invalidates data().
  bool Append(const void* bytes, int64_t byte_count) {
    if (byte_count < 0 || byte_count > limit_bytes_ - size_) return false;
    if (byte_count == 0) return true;
    const int64_t needed = size_ + byte_count;
    if (needed > capacity_) {
      const int64_t grown = std::min(limit_bytes_, std::max({needed, 2 * size_, std::min(kFirstBytes, limit_bytes_)}));
      // realloc moves large blocks by remapping pages, not by copying them.
      void* const moved = std::realloc(data_.get(), static_cast<size_t>(grown));
      if (moved == nullptr) return false;
      static_cast<void>(data_.release());
      data_.reset(static_cast<uint8_t*>(moved));
      capacity_ = grown;
    }
    std::memcpy(data_.get() + size_, bytes, static_cast<size_t>(byte_count));
    size_ = needed;
    return true;
  }

  // 16-byte aligned; null while empty.
  const uint8_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  // Bytes allocated: at most twice size(), or kFirstBytes.
  int64_t capacity() const { return capacity_; }

  // The largest first allocation, if the limit is not lower.
  static constexpr int64_t kFirstBytes = 4 << 20;

 private:
  struct Free {
    void operator()(uint8_t* pointer) const { std::free(pointer); }
  };
  int64_t limit_bytes_;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
  std::unique_ptr<uint8_t, Free> data_;
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_GROWING_BUFFER_H_
