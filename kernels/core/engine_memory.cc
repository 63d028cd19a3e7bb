// LossEngine's default bodies for memory and digests, as engines without a device use them.
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/planned_bytes.h"

namespace headwater {
namespace {

class PlainMemory final : public HostMemory {
 public:
  PlainMemory(PlannedBytes data, int64_t bytes) : data_(std::move(data)), bytes_(bytes) {}
  void* data() const override { return data_.get(); }
  int64_t bytes() const override { return bytes_; }

 private:
  const PlannedBytes data_;
  const int64_t bytes_;
};

class BorrowedMemory final : public HostMemory {
 public:
  BorrowedMemory(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  void* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* const data_;
  const int64_t bytes_;
};

absl::Status NoDevice(const std::string& engine, const char* what) {
  return MakeError(ErrorReason::kFeatureNotBuilt, "the engine " + engine + " has no device: it cannot open " + what,
                   {{"feature", "cuda_ipc"}});
}

}  // namespace

absl::Status LossEngine::DoDigestRows(absl::Span<const RowsView> streams, const DeviceEvent* after, DigestBuilder* digest) {
  if (after != nullptr) {
    return MakeError(ErrorReason::kInvalidField, "after must not be given: the engine " + name() + " has no device",
                     {{"field", "after"}, {"expected", "none"}, {"actual", "an event"}});
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const RowsView& rows = streams[i];
    if (rows.data == nullptr) continue;
    if (rows.memory != MemorySpace::kHost) return NoDevice(name(), "rows in device memory");
    digest->AddRows(static_cast<int32_t>(i), 0, rows.row_count, rows.column_count * ElementBytes(rows.data_type), rows.data);
  }
  return absl::OkStatus();
}

absl::Status LossEngine::DoCopyRows(const RowsView& rows, const DeviceEvent*, void* out) {
  if (rows.memory != MemorySpace::kHost) return NoDevice(name(), "rows in device memory");
  const int64_t bytes = rows.row_count * rows.column_count * ElementBytes(rows.data_type);
  if (bytes > 0) std::memcpy(out, rows.data, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HostMemory>> LossEngine::DoAllocateHostMemory(int64_t bytes) {
  absl::StatusOr<PlannedBytes> data = AllocatePlanned(bytes);
  if (!data.ok()) return data.status();
  return std::unique_ptr<HostMemory>(std::make_unique<PlainMemory>(*std::move(data), bytes));
}

absl::StatusOr<std::unique_ptr<HostMemory>> LossEngine::DoRegisterHostMemory(void* data, int64_t bytes) {
  return std::unique_ptr<HostMemory>(std::make_unique<BorrowedMemory>(data, bytes));
}

absl::StatusOr<std::unique_ptr<DeviceRegion>> LossEngine::DoOpenDeviceMemory(const DeviceHandle&, int64_t) {
  return NoDevice(name(), "device memory of another process");
}

absl::StatusOr<std::unique_ptr<DeviceEvent>> LossEngine::DoOpenDeviceEvent(const DeviceHandle&) {
  return NoDevice(name(), "an event of another process");
}

}  // namespace headwater
