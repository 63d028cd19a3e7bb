// Rows in the memory of a GPU, for the bench: this program needs neither CUDA's headers nor its runtime, only the driver at run
// time.
#ifndef HEADWATER_CLIENT_CTL_DEVICE_ROWS_H_
#define HEADWATER_CLIENT_CTL_DEVICE_ROWS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace headwater::ctl {

// An allocation on GPU 0, as the driver counts the visible ones. Freed with the object.
class DeviceRows {
 public:
  // FAILED_PRECONDITION, saying why, where there is no driver or no GPU; RESOURCE_EXHAUSTED if it has no room.
  static absl::StatusOr<std::unique_ptr<DeviceRows>> Allocate(int64_t bytes);
  ~DeviceRows();
  DeviceRows(const DeviceRows&) = delete;
  DeviceRows& operator=(const DeviceRows&) = delete;

  void* data() const { return reinterpret_cast<void*>(pointer_); }
  // Copies `bytes` of host memory to its beginning.
  absl::Status Fill(const void* from, int64_t bytes);

 private:
  DeviceRows() = default;

  void* context_ = nullptr;
  uint64_t pointer_ = 0;
};

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_DEVICE_ROWS_H_
