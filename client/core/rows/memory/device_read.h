// DeviceRead: a copy of device memory to page-locked host memory that is under way, piece by piece in order, so that the first
// bytes can be sent while the others come.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_DEVICE_READ_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_DEVICE_READ_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/rows/memory/device_memory.h"

namespace headwater::client::internal {

// Thread-safe.
class DeviceRead {
 public:
  // Bytes of a piece: 80 us over PCIe 5, and as much as several streams take at once to begin with.
  static constexpr int64_t kPieceBytes = int64_t{4} << 20;

  // Begins to copy `bytes` (>= 1) after the work so far of `stream`, on the stream, and waits for the first piece: what is left
  // then waits for nothing but the copy itself. `to` must be page-locked. Both memories must stay until this object has gone.
  static absl::StatusOr<std::unique_ptr<DeviceRead>> Begin(std::shared_ptr<DeviceContext> context, CuStream stream, void* to,
                                                           const void* from, int64_t bytes);
  // Waits for the whole copy.
  ~DeviceRead();
  DeviceRead(const DeviceRead&) = delete;
  DeviceRead& operator=(const DeviceRead&) = delete;

  // Blocks until the first `bytes` (>= 1) are there.
  absl::Status Await(int64_t bytes) const;
  absl::Status AwaitAll() const;

 private:
  explicit DeviceRead(std::shared_ptr<DeviceContext> context) : context_(std::move(context)) {}
  absl::Status AwaitPiece(size_t piece) const;

  const std::shared_ptr<DeviceContext> context_;
  std::vector<CuEvent> events_;  // one behind each piece
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_DEVICE_READ_H_
