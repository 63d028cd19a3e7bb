#include "server/transport/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::transport {
namespace {

constexpr int64_t kTmpfsMagic = 0x01021994;
constexpr int kNeededSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14
#endif

// The range lies within `source_bytes`.
absl::Status CheckWithin(int64_t offset, int64_t bytes, int64_t source_bytes) {
  if (bytes <= source_bytes && offset <= source_bytes - bytes) return absl::OkStatus();
  return InvalidRegion("size_bytes", absl::StrCat("offset_bytes + size_bytes within the source's ", source_bytes, " bytes"),
                       absl::StrCat(offset, " + ", bytes));
}

// A memfd, mapped and page-locked.
class SharedRegion final : public Region {
 public:
  SharedRegion(std::shared_ptr<RegionCounts> counts, void* mapping, size_t mapping_bytes, size_t skip, int64_t bytes)
      : Region(RegionKind::kShared, bytes, std::move(counts)), mapping_(mapping), mapping_bytes_(mapping_bytes), skip_(skip) {}
  ~SharedRegion() override {
    locked_.reset();
    munmap(mapping_, mapping_bytes_);
  }
  absl::Status Lock(LossEngine& engine) {
    HEADWATER_ASSIGN_OR_RETURN(locked_, engine.RegisterHostMemory(mapping_, static_cast<int64_t>(mapping_bytes_)));
    return absl::OkStatus();
  }
  uint8_t* data() const override { return static_cast<uint8_t*>(mapping_) + skip_; }

 private:
  void* const mapping_;
  const size_t mapping_bytes_;
  const size_t skip_;  // from the mapping's beginning to the region's
  std::unique_ptr<HostMemory> locked_;
};

// A file that its owner may truncate at any time: only ever read and written by system calls, which then fail.
class NamedRegion final : public Region {
 public:
  NamedRegion(LossEngine& engine, std::shared_ptr<RegionCounts> counts, FileDescriptor file, int64_t offset, int64_t bytes)
      : Region(RegionKind::kNamed, bytes, std::move(counts)), engine_(engine), file_(std::move(file)), offset_(offset) {}

  absl::StatusOr<std::unique_ptr<HostMemory>> AllocateCopy(int64_t bytes) const override {
    return engine_.AllocateHostMemory(bytes);
  }
  absl::Status Read(int64_t offset, int64_t bytes, void* to, const std::string& field) const override {
    return Move(bytes, field, [&](int64_t done, size_t left) {
      return pread(file_.get(), static_cast<uint8_t*>(to) + done, left, offset_ + offset + done);
    });
  }
  absl::Status Write(int64_t offset, int64_t bytes, const void* from, const std::string& field) const override {
    // A write beyond the end would make the file longer.
    struct stat status {};
    if (fstat(file_.get(), &status) != 0 || status.st_size < offset_ + offset + bytes) return Shorter(field);
    return Move(bytes, field, [&](int64_t done, size_t left) {
      return pwrite(file_.get(), static_cast<const uint8_t*>(from) + done, left, offset_ + offset + done);
    });
  }

 private:
  static absl::Status Shorter(const std::string& field) {
    return InvalidRegion(field, "a named region as long as it was when it was registered", "a shorter one");
  }
  template <typename Step>
  static absl::Status Move(int64_t bytes, const std::string& field, Step&& step) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t moved = step(done, static_cast<size_t>(bytes - done));
      if (moved < 0 && errno == EINTR) continue;
      if (moved <= 0) return Shorter(field);
      done += moved;
    }
    return absl::OkStatus();
  }

  LossEngine& engine_;
  const FileDescriptor file_;
  const int64_t offset_;
};

class ImportedRegion final : public Region {
 public:
  ImportedRegion(std::shared_ptr<RegionCounts> counts, std::unique_ptr<DeviceRegion> memory,
                 std::shared_ptr<const DeviceEvent> event, int64_t bytes)
      : Region(RegionKind::kDevice, bytes, std::move(counts)), memory_(std::move(memory)), event_(std::move(event)) {}
  uint8_t* data() const override { return static_cast<uint8_t*>(memory_->data()); }
  const DeviceEvent* after() const override { return event_.get(); }

 private:
  const std::unique_ptr<DeviceRegion> memory_;
  const std::shared_ptr<const DeviceEvent> event_;
};

}  // namespace

absl::Status InvalidRegion(const std::string& field, const std::string& expected, const std::string& actual) {
  return MakeError(ErrorReason::kInvalidField, absl::StrCat(field, ": expected ", expected, ", got ", actual),
                   {{"field", field}, {"expected", expected}, {"actual", actual}});
}

Region::Ticket::Ticket(RegionKind region_kind, int64_t region_bytes, std::shared_ptr<RegionCounts> region_counts)
    : kind(region_kind), bytes(region_bytes), counts(std::move(region_counts)) {
  counts->regions[static_cast<size_t>(kind)] += 1;
  counts->bytes[static_cast<size_t>(kind)] += bytes;
}

Region::Ticket::~Ticket() {
  counts->regions[static_cast<size_t>(kind)] -= 1;
  counts->bytes[static_cast<size_t>(kind)] -= bytes;
  end->Come();
}

absl::Status RegionEnd::Await(const scheduler::WaitLimits& limits) {
  absl::MutexLock lock(&mutex_);
  while (!over_) {
    absl::Status status = Wait(waiting_, mutex_, limits, "waited for those that use the region, which is removed");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void RegionEnd::Come() {
  absl::MutexLock lock(&mutex_);
  over_ = true;
  waiting_.WakeAll();
}

absl::StatusOr<std::unique_ptr<HostMemory>> Region::AllocateCopy(int64_t) const {
  return MakeError(ErrorReason::kInternal, "a mapped region needs no copy");
}
absl::Status Region::Read(int64_t, int64_t, void*, const std::string&) const { return AllocateCopy(0).status(); }
absl::Status Region::Write(int64_t, int64_t, const void*, const std::string&) const { return AllocateCopy(0).status(); }

absl::Status CheckSealedMemory(int fd, const std::string& field, int64_t* size) {
  const int seals = fcntl(fd, F_GET_SEALS);
  // Huge pages of their own file system, secret memory and files on disks are not tmpfs: their pages may fail to come.
  struct statfs system {};
  struct stat status {};
  if (seals < 0 || fstatfs(fd, &system) != 0 || static_cast<int64_t>(system.f_type) != kTmpfsMagic || fstat(fd, &status) != 0) {
    return InvalidRegion(field, "a descriptor of memory made by memfd_create(MFD_ALLOW_SEALING), without MFD_HUGETLB",
                         "another one");
  }
  if ((seals & kNeededSeals) != kNeededSeals) {
    return InvalidRegion(field, "memory sealed with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL",
                         absl::StrCat("memory without", (seals & F_SEAL_SHRINK) == 0 ? " F_SEAL_SHRINK"
                                                        : (seals & F_SEAL_GROW) == 0 ? " F_SEAL_GROW"
                                                                                     : " F_SEAL_SEAL"));
  }
  const int flags = fcntl(fd, F_GETFL);
  constexpr int kReadOnlySeals = F_SEAL_WRITE | 0x0010;  // F_SEAL_FUTURE_WRITE
  if (flags < 0 || (flags & O_ACCMODE) != O_RDWR || (seals & kReadOnlySeals) != 0) {
    return InvalidRegion(field, "memory that can be read and written", "memory that can only be read");
  }
  if (status.st_size < 1) return InvalidRegion(field, "memory of at least one byte", "0 bytes");
  // Untouched memory would be allocated, and charged, by the process that touches it first: this one.
  if (int64_t{status.st_blocks} < status.st_size / 512) {
    return InvalidRegion(field, "memory that is allocated in full (fallocate, or write to every page)",
                         absl::StrCat(int64_t{status.st_blocks} * 512, " of ", int64_t{status.st_size}, " bytes"));
  }
  *size = status.st_size;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Region>> MapDescriptor(LossEngine& engine, std::shared_ptr<RegionCounts> counts,
                                                            const FileDescriptor& memfd, int64_t offset, int64_t bytes) {
  int64_t size = 0;
  if (absl::Status status = CheckSealedMemory(memfd.get(), "descriptor_token", &size); !status.ok()) return status;
  if (absl::Status status = CheckWithin(offset, bytes, size); !status.ok()) return status;
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t skip = offset % page;
  const int64_t pages = (skip + bytes + page - 1) / page;  // cannot wrap: the file is that long
  const size_t mapping_bytes = static_cast<size_t>(pages * page);
  void* const mapping = mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), offset - skip);
  if (mapping == MAP_FAILED) {
    return MakeError(ErrorReason::kMemoryBudgetExceeded,
                     absl::StrCat("the system does not map ", bytes, " bytes of shared memory for this server"),
                     {{"requestedBytes", absl::StrCat(bytes)}});
  }
  auto region = std::make_shared<SharedRegion>(std::move(counts), mapping, mapping_bytes, static_cast<size_t>(skip), bytes);
  // Only faster: without it each page is mapped when it is first touched.
  static_cast<void>(madvise(mapping, mapping_bytes, kPopulateWrite));
  if (absl::Status status = region->Lock(engine); !status.ok()) return status;
  return std::shared_ptr<const Region>(std::move(region));
}

absl::StatusOr<std::shared_ptr<const Region>> OpenNamedRegion(LossEngine& engine, std::shared_ptr<RegionCounts> counts,
                                                              const std::string& folder, const std::string& name, int64_t offset,
                                                              int64_t bytes) {
  // Follows no symbolic link, and a hard link is refused below: a client's name stands for a file made under it. A FIFO would
  // block.
  FileDescriptor file(open(absl::StrCat(folder, "/", name).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (!file.valid() || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_nlink != 1) {
    return InvalidRegion("shared_memory_name", "a file under /dev/shm of the server's host that its user may read and write",
                         "none, or something else");
  }
  if (absl::Status within = CheckWithin(offset, bytes, status.st_size); !within.ok()) return within;
  return std::shared_ptr<const Region>(std::make_shared<NamedRegion>(engine, std::move(counts), std::move(file), offset, bytes));
}

absl::StatusOr<std::shared_ptr<const Region>> OpenDeviceRegion(LossEngine& engine, std::shared_ptr<RegionCounts> counts,
                                                               const DeviceHandle& memory, std::shared_ptr<const DeviceEvent> event,
                                                               int64_t bytes) {
  HEADWATER_ASSIGN_OR_RETURN(auto opened, engine.OpenDeviceMemory(memory, bytes));
  if (opened->bytes() < bytes) {
    return InvalidRegion("size_bytes", absl::StrCat("at most ", opened->bytes(), ", the bytes of the allocation"),
                         absl::StrCat(bytes));
  }
  return std::shared_ptr<const Region>(
      std::make_shared<ImportedRegion>(std::move(counts), std::move(opened), std::move(event), bytes));
}

}  // namespace headwater::transport
