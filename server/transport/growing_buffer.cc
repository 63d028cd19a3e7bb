#include "server/transport/growing_buffer.h"

#include <algorithm>
#include <cstring>

namespace headwater::transport {

bool GrowingBuffer::Append(const void* bytes, int64_t byte_count) {
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

}  // namespace headwater::transport
