// RegionRegistry: memory of other processes that sessions have registered, and its use by calls.
//
//   RegionRegistry regions(engine, {.max_session_regions = 64, .max_region_bytes = int64_t{64} << 30});
//   auto id = regions.AddDescriptor(session, std::move(memfd), /*offset=*/0, bytes);
//   auto rows = regions.Find(session, *id, offset, row_bytes, RegionAccess::kRead, sizeof(float), "header.hidden_rows");
//   rows->Prepare();  // rows->data() is valid from here on, as long as `rows` lives
//   ...
//   written->Finish();  // after the last byte of a kWrite range has been written, before the answer
//
// A region belongs to one session. Other sessions' ids, and removed ids, are answered like ids that never existed. A region stays
// mapped until it has been removed and no RegionUse is left, however the session ended. Thread-safe; slow work (mapping,
// page-locking, giving back) is done without the lock.
//
// A memfd is sealed, mapped and page-locked. A named region (/dev/shm/NAME) is never mapped: Prepare() copies its bytes into the
// server's memory and Finish() writes them back. docs/adr/0013-shared-memory.md has the reasons.
#ifndef HEADWATER_SERVER_TRANSPORT_REGION_REGISTRY_H_
#define HEADWATER_SERVER_TRANSPORT_REGION_REGISTRY_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
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
  void Come() {
    absl::MutexLock lock(&mutex_);
    over_ = true;
    waiting_.WakeAll();
  }

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

using OpenedRegion = absl::StatusOr<std::shared_ptr<const Region>>;

// Whether `fd` is memory that can be mapped safely: a memfd on tmpfs of at least one byte, readable and writable. It is sealed
// against shrinking, growing and further seals, and allocated in full. Else kInvalidField naming `field`. Returns its bytes.
absl::StatusOr<int64_t> CheckSealedMemory(int fd, const std::string& field);

// The session that owns a region (heads::SessionId).
using RegionOwner = std::array<uint8_t, 32>;

enum class RegionAccess { kRead, kWrite };

// Whether clients may register the name: `headwater-` and 1 to 200 of [A-Za-z0-9._-]. Names of other software in the server's
// process under /dev/shm (NCCL, the CUDA driver, semaphores) do not match and cannot be reached.
bool IsRegionName(const std::string& name);

struct RegionLimits {
  int64_t max_session_regions = 64;              // of one session
  int64_t max_region_bytes = int64_t{64} << 30;  // of one region
};

// A range of a region, for one call. Movable; its memory stays valid as long as it lives.
class RegionUse {
 public:
  RegionKind kind() const { return region_->kind(); }
  // kDevice for a device region, else kHost.
  MemorySpace memory() const { return kind() == RegionKind::kDevice ? MemorySpace::kDevice : MemorySpace::kHost; }
  int64_t bytes() const { return bytes_; }
  // Host memory that Prepare() allocates, which a byte budget should reserve before: bytes() for a named region, else 0.
  int64_t staged_bytes() const { return kind() == RegionKind::kNamed ? bytes_ : 0; }
  // Device memory: the event that reads and writes must wait for (MicroBatch::after); null without one.
  const DeviceEvent* after() const { return region_->after(); }

  // Makes data() valid; reads a named region's bytes for kRead. Blocks for the copy. Once. kInvalidField: the named region is
  // shorter than it was; kMemoryBudgetExceeded.
  absl::Status Prepare();
  // The first byte of the range, after Prepare() has succeeded.
  void* data() const { return data_; }
  // Makes bytes written into a kWrite range visible to the client; without effect for kRead. kInvalidField as Prepare().
  absl::Status Finish();

  static bool Overlap(const RegionUse& a, const RegionUse& b);

 private:
  friend class RegionRegistry;
  LossEngine* engine_ = nullptr;
  std::shared_ptr<const Region> region_;
  int64_t offset_ = 0;
  int64_t bytes_ = 0;
  RegionAccess access_ = RegionAccess::kRead;
  std::string field_;
  void* data_ = nullptr;
  std::unique_ptr<HostMemory> copy_;
};

class RegionRegistry {
 public:
  // `engine` must outlive the registry and every RegionUse.
  RegionRegistry(LossEngine& engine, const RegionLimits& limits) : engine_(engine), limits_(limits) {}

  // Registers bytes [offset, offset + bytes) of a source, and returns the region's id, random and never used again. The caller
  // keeps the owner alive until this returns (SessionRegistry::Use), and calls DropOwner() after its end.
  //
  // Errors: kInvalidField (a range that is empty, negative, wraps or exceeds the source, or an unusable source, saying why),
  // kLimitExceeded (max_region_bytes), kQuotaExceeded (max_session_regions), kMemoryBudgetExceeded (it cannot be page-locked).
  //
  // `offset` is a multiple of 64.
  //
  // A memfd; closed when this returns.
  absl::StatusOr<std::string> AddDescriptor(const RegionOwner& owner, FileDescriptor memfd, int64_t offset, int64_t bytes);
  // A file under /dev/shm (or `folder`, for tests) that the server's user may read and write; no link. IsRegionName() accepts the
  // name. The caller has checked that the operator allows names.
  absl::StatusOr<std::string> AddNamed(const RegionOwner& owner, const std::string& name, int64_t offset, int64_t bytes,
                                       const std::string& folder = "/dev/shm");
  // The allocation that a CUDA IPC handle names; calls wait for what `event` was last recorded after. Regions with the same event
  // handle share one DeviceEvent. kFeatureNotBuilt without a device.
  absl::StatusOr<std::string> AddDevice(const RegionOwner& owner, const DeviceHandle& memory,
                                        const std::optional<DeviceHandle>& event, int64_t bytes);

  // Removes a region. The end that it returns comes when no RegionUse is left and the region is given back. From then on this
  // process neither reads nor writes the memory. kRegionNotFound.
  absl::StatusOr<std::shared_ptr<RegionEnd>> Remove(const RegionOwner& owner, const std::string& id);
  // Removes all regions of an owner. Returns how many.
  int64_t DropOwner(const RegionOwner& owner);

  // A range for one call; nothing is copied before RegionUse::Prepare(). `field` names the SharedRows in the request, for errors.
  // kRegionNotFound; kInvalidField unless 0 <= offset, 0 <= bytes, offset + bytes <= the region's size and offset is a multiple of
  // `element_bytes` (>= 1).
  absl::StatusOr<RegionUse> Find(const RegionOwner& owner, const std::string& id, int64_t offset, int64_t bytes,
                                 RegionAccess access, int64_t element_bytes, const std::string& field) const;

  // The regions mapped now, including removed ones that calls still use.
  const RegionCounts& totals() const { return *counts_; }

 private:
  absl::StatusOr<std::shared_ptr<const DeviceEvent>> OpenEvent(const DeviceHandle& handle);
  absl::StatusOr<std::string> Add(const RegionOwner& owner, int64_t offset, int64_t bytes,
                                  const std::function<OpenedRegion()>& open);

  LossEngine& engine_;
  const RegionLimits limits_;
  const std::shared_ptr<RegionCounts> counts_ = std::make_shared<RegionCounts>();
  mutable absl::Mutex mutex_;
  // By owner and id; null while it is being opened.
  std::map<std::pair<RegionOwner, std::string>, std::shared_ptr<const Region>> regions_ ABSL_GUARDED_BY(mutex_);
  absl::Mutex events_mutex_;  // held while one is opened
  std::map<DeviceHandle, std::weak_ptr<const DeviceEvent>> events_ ABSL_GUARDED_BY(events_mutex_);
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_REGION_REGISTRY_H_
