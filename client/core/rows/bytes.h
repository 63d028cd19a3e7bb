// Memory whose size depends on rows, weights or the log: where it fails, that is an error.
#ifndef HEADWATER_CLIENT_CORE_ROWS_BYTES_H_
#define HEADWATER_CLIENT_CORE_ROWS_BYTES_H_

#include <cstdint>
#include <memory>
#include <new>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace headwater::client::internal {

// RESOURCE_EXHAUSTED / MEMORY_BUDGET_EXCEEDED.
absl::Status NoMemoryFor(int64_t bytes, const char* what);

// Uninitialized memory; aligned for every element type. Move-only.
class Bytes {
 public:
  Bytes() = default;
  static absl::StatusOr<Bytes> Allocate(int64_t size, const char* what);

  unsigned char* data() const { return data_.get(); }
  int64_t size() const { return size_; }

 private:
  std::unique_ptr<unsigned char[]> data_;
  int64_t size_ = 0;
};

// Runs `work`, which returns an absl::Status and makes messages or strings of about so many bytes.
template <typename Work>
absl::Status WithMemoryFor(int64_t bytes, const char* what, Work work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return NoMemoryFor(bytes, what);
  }
}

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_BYTES_H_
