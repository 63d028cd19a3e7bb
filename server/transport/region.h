// Region: memory of another process, opened by this one and kept by RegionRegistry.
#ifndef HEADWATER_SERVER_TRANSPORT_REGION_H_
#define HEADWATER_SERVER_TRANSPORT_REGION_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"
#include "server/scheduler/waiting.h"
#include "server/transport/file_descriptor.h"

namespace headwater::transport {

// Sealed host memory that is mapped here, a file under /dev/shm that is read and written, device memory.
enum class RegionKind { kShared, kNamed, kDevice, kCount };

// Regions that are open, by kind.
struct RegionCounts {
  std::array<std::atomic<int64_t>, static_cast<size_t>(RegionKind::kCount)> regions{};
  std::array<std::atomic<int64_t>, static_cast<size_t>(RegionKind::kCount)> bytes{};
};

// The moment from which a region has been given back in full. Thread-safe.
class RegionEnd {
 public:
  // Waits for it. kDeadlineExceeded, kCancelled and the other errors that end a wait.
  absl::Status Await(const scheduler::WaitLimits& limits);
  void Come();

 private:
  absl::Mutex mutex_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  scheduler::WaitList waiting_;
};

// Thread-safe. Destruction closes its memory and then signals its RegionEnd.
class Region {
 public:
  // The owner of a region's memory, and where the region lies.
  struct Memory {
    std::shared_ptr<void> owner = nullptr;               // of mapped memory; null for a named region
    uint8_t* data = nullptr;                             // where the region is mapped; null for a named region
    std::shared_ptr<const DeviceEvent> after = nullptr;  // the event that uses of device memory wait for, or null
    FileDescriptor file{};                               // of a named region
    int64_t file_offset = 0;
  };
  Region(RegionKind kind, int64_t bytes, std::shared_ptr<RegionCounts> counts, Memory memory);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  RegionKind kind() const { return kind_; }
  int64_t bytes() const { return bytes_; }
  std::shared_ptr<RegionEnd> end() const { return end_; }
  uint8_t* data() const { return memory_.data; }
  const DeviceEvent* after() const { return memory_.after.get(); }

  // Copies a part of a named region; 0 <= offset, offset + bytes <= bytes(). kInvalidField, naming `field`, if the file has become
  // shorter.
  absl::Status Read(int64_t offset, int64_t bytes, void* to, const std::string& field) const;
  absl::Status Write(int64_t offset, int64_t bytes, const void* from, const std::string& field) const;

 private:
  const RegionKind kind_;
  const int64_t bytes_;
  const std::shared_ptr<RegionCounts> counts_;
  const std::shared_ptr<RegionEnd> end_ = std::make_shared<RegionEnd>();
  Memory memory_;
};

// The openers behind RegionRegistry's Add... functions, which document ranges and errors. 0 <= offset, 1 <= bytes, and their sum
// does not wrap. `engine` must outlive the region.
using OpenedRegion = absl::StatusOr<std::shared_ptr<const Region>>;
OpenedRegion MapDescriptor(LossEngine& engine, std::shared_ptr<RegionCounts> counts, const FileDescriptor& memfd, int64_t offset,
                           int64_t bytes);
OpenedRegion OpenNamedRegion(std::shared_ptr<RegionCounts> counts, const std::string& folder, const std::string& name,
                             int64_t offset, int64_t bytes);
OpenedRegion OpenDeviceRegion(LossEngine& engine, std::shared_ptr<RegionCounts> counts, const DeviceHandle& memory,
                              std::shared_ptr<const DeviceEvent> event, int64_t bytes);

// Whether `fd` is memory that can be mapped safely: a memfd on tmpfs of at least one byte, readable and writable. It is sealed
// against shrinking, growing and further seals, and allocated in full. Else kInvalidField naming `field`. Returns its bytes.
absl::StatusOr<int64_t> CheckSealedMemory(int fd, const std::string& field);

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_REGION_H_
