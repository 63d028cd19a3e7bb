// DeviceMemory: device memory of this process that another process on the same host can open, and the order of work on it.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_DEVICE_MEMORY_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_DEVICE_MEMORY_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/rows/memory/arena.h"
#include "client/core/rows/memory/cuda_driver.h"

namespace headwater::client::internal {

// One CUDA context of this process, as used for rows. Thread-safe. The primary context of a device, which nearly all programs use,
// lives at least as long as this object. The owner of another context must keep it.
class DeviceContext {
 public:
  static absl::StatusOr<std::shared_ptr<DeviceContext>> Make(const CudaDriver& driver, CuContext context);
  // The primary context of GPU 0, as the driver counts the visible ones, which is kept to the program's end.
  static absl::StatusOr<std::shared_ptr<DeviceContext>> OfFirstGpu();
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  const CudaDriver& driver() const { return driver_; }
  CuContext context() const { return context_; }
  // The handle of the interprocess event that Record() records.
  const CuIpcHandle& event_handle() const { return event_handle_; }

  // The event stands for the work so far of `stream`, and for all that it stood for before: calls of several streams share it.
  absl::Status Record(CuStream stream);
  // Copies after the work so far of `stream`, on the stream. Does not wait for it.
  absl::Status CopyOn(CuStream stream, void* to, const void* from, int64_t bytes);
  absl::Status Synchronize(CuStream stream);
  // CopyOn(), and waits for it.
  absl::Status CopyNow(CuStream stream, void* to, const void* from, int64_t bytes);
  // Copies after the event's work, on a stream of its own. Does not wait for it, if the host's memory is page-locked.
  absl::Status CopyAfterEvent(void* to, const void* from, int64_t bytes);
  // Waits for all that CopyAfterEvent() has begun.
  absl::Status AwaitCopies();

 private:
  DeviceContext(const CudaDriver& driver, CuContext context) : driver_(driver), context_(context) {}

  // Holds the context, if it is a primary one.
  absl::Status Hold();

  const CudaDriver& driver_;
  const CuContext context_;
  std::optional<CuDevice> held_;  // the device whose primary context it is
  CuEvent event_ = nullptr;
  CuIpcHandle event_handle_{};
  CuStream own_stream_ = nullptr;
  std::mutex mutex_;  // one Record() at a time
};

// A whole allocation, of the caller or of this client.
class DeviceBacking final : public Backing {
 public:
  // The caller's memory, which is not freed here.
  DeviceBacking(std::shared_ptr<DeviceContext> context, CuDevicePointer base, int64_t bytes, const CuIpcHandle& handle, bool owned)
      : context_(std::move(context)), base_(base), bytes_(bytes), handle_(handle), owned_(owned) {}
  // Memory of this client that can be exported. RESOURCE_EXHAUSTED if there is none left.
  static absl::StatusOr<std::shared_ptr<const DeviceBacking>> Allocate(const std::shared_ptr<DeviceContext>& context,
                                                                       int64_t bytes);
  ~DeviceBacking() override;

  uint8_t* data() const override { return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(base_)); }
  int64_t bytes() const override { return bytes_; }
  const CuIpcHandle& handle() const { return handle_; }
  const std::shared_ptr<DeviceContext>& context() const { return context_; }

 private:
  const std::shared_ptr<DeviceContext> context_;
  const CuDevicePointer base_;
  const int64_t bytes_;
  const CuIpcHandle handle_;
  const bool owned_;
};

// Thread-safe.
class DeviceMemory {
 public:
  // `drop` is called with backings before they go; see Arena. At most `max_bytes` (for each context) are allocated for rows that
  // cannot be exported where they lie.
  DeviceMemory(int64_t max_bytes, Arena::Drop drop);
  // Drops all backings.
  ~DeviceMemory();

  // The driver's context that the memory at `data` belongs to. An error says why there is none.
  absl::StatusOr<std::shared_ptr<DeviceContext>> ContextOf(const void* data);
  // The allocation in which [data, data + bytes) lies. FAILED_PRECONDITION, in one sentence, if it cannot be exported. Repeated
  // calls return one object as long as the allocation lives and is asked for now and then. A new allocation at the same address
  // gets another object.
  absl::StatusOr<std::shared_ptr<const DeviceBacking>> Export(const void* data, int64_t bytes);
  // Memory that can be exported. RESOURCE_EXHAUSTED if there is none left.
  absl::StatusOr<std::shared_ptr<Arena::Block>> Allocate(const std::shared_ptr<DeviceContext>& context, int64_t bytes);
  void Retire(const Backing& backing);

 private:
  struct Known {
    CuDevicePointer base = 0;
    uint64_t buffer_id = 0;
    std::shared_ptr<const DeviceBacking> backing;
  };
  absl::StatusOr<std::shared_ptr<DeviceContext>> ContextFor(const CudaDriver& driver, CuContext context);

  const int64_t max_bytes_;
  const Arena::Drop drop_;
  std::mutex mutex_;
  std::map<CuContext, std::shared_ptr<DeviceContext>> contexts_;
  std::map<CuContext, std::unique_ptr<Arena>> arenas_;
  std::list<Known> known_;  // the caller's allocations, the last used first
};

// A copy of device memory to page-locked host memory in progress, piece by piece in order. The first bytes can be sent while the
// others come. Thread-safe.
class DeviceRead {
 public:
  // Bytes of a piece: 80 us over PCIe 5, and as much as several streams take at once to begin with.
  static constexpr int64_t kPieceBytes = int64_t{4} << 20;

  // Begins to copy `bytes` (>= 1) on `stream`, after its work so far, and waits for the first piece. The other pieces then wait
  // only for the copy itself. `to` must be page-locked. Both memories must stay until this object has gone.
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

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_DEVICE_MEMORY_H_
