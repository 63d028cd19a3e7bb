#include "client/core/rows/bytes.h"

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"

namespace headwater::client::internal {

absl::Status NoMemoryFor(int64_t bytes, const char* what) {
  return MakeLocalError(v1::ERROR_REASON_MEMORY_BUDGET_EXCEEDED, absl::StatusCode::kResourceExhausted,
                        absl::StrCat("no memory for ", bytes, " bytes of ", what, " on this side"),
                        {{"requestedBytes", absl::StrCat(bytes)}});
}

absl::StatusOr<Bytes> Bytes::Allocate(int64_t size, const char* what) {
  Bytes bytes;
  bytes.data_.reset(new (std::nothrow) unsigned char[static_cast<size_t>(size)]);
  if (bytes.data_ == nullptr) return NoMemoryFor(size, what);
  bytes.size_ = size;
  return bytes;
}

}  // namespace headwater::client::internal
