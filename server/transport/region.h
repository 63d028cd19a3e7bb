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
  virtual ~Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  RegionKind kind() const { return ticket_.kind; }
  int64_t bytes() const { return ticket_.bytes; }
  std::shared_ptr<RegionEnd> end() const { return ticket_.end; }

  // Where the region is mapped; null for a named one.
  virtual uint8_t* data() const { return nullptr; }
  // The event that uses of the device memory wait for, or null.
  virtual const DeviceEvent* after() const { return nullptr; }
  // Named regions: memory for a copy of a part, and the copies. 0 <= offset, offset + bytes <= bytes(). kInvalidField, naming
  // `field`, if the file has become shorter.
  virtual absl::StatusOr<std::unique_ptr<HostMemory>> AllocateCopy(int64_t bytes) const;
  virtual absl::Status Read(int64_t offset, int64_t bytes, void* to, const std::string& field) const;
  virtual absl::Status Write(int64_t offset, int64_t bytes, const void* from, const std::string& field) const;

 protected:
  Region(RegionKind kind, int64_t bytes, std::shared_ptr<RegionCounts> counts) : ticket_(kind, bytes, std::move(counts)) {}

 private:
  // Counts the region, and signals its end. A member of the base, so that it is destroyed after all members of a derived class.
  struct Ticket {
    Ticket(RegionKind region_kind, int64_t region_bytes, std::shared_ptr<RegionCounts> region_counts);
    ~Ticket();
    const RegionKind kind;
    const int64_t bytes;
    const std::shared_ptr<RegionCounts> counts;
    const std::shared_ptr<RegionEnd> end = std::make_shared<RegionEnd>();
  };
  const Ticket ticket_;
};

// The openers behind RegionRegistry's Add... functions, which document ranges and errors. 0 <= offset, 1 <= bytes, and their sum
// does not wrap. `engine` must outlive the region.
absl::StatusOr<std::shared_ptr<const Region>> MapDescriptor(LossEngine& engine, std::shared_ptr<RegionCounts> counts,
                                                            const FileDescriptor& memfd, int64_t offset, int64_t bytes);
absl::StatusOr<std::shared_ptr<const Region>> OpenNamedRegion(LossEngine& engine, std::shared_ptr<RegionCounts> counts,
                                                              const std::string& folder, const std::string& name, int64_t offset,
                                                              int64_t bytes);
absl::StatusOr<std::shared_ptr<const Region>> OpenDeviceRegion(LossEngine& engine, std::shared_ptr<RegionCounts> counts,
                                                               const DeviceHandle& memory, std::shared_ptr<const DeviceEvent> event,
                                                               int64_t bytes);

// kInvalidField: a region's properties are not as declared, or not allowed.
absl::Status InvalidRegion(const std::string& field, const std::string& expected, const std::string& actual);

// OK if `fd` is memory that can be mapped safely: a memfd on tmpfs of at least one byte, readable and writable. It is sealed
// against shrinking, growing and further seals, and allocated in full. Else kInvalidField naming `field`. `size` receives its
// bytes.
absl::Status CheckSealedMemory(int fd, const std::string& field, int64_t* size);

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_REGION_H_
