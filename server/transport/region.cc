#include "server/transport/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
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

// A region's properties are not as declared, or not allowed.
absl::Status InvalidRegion(const std::string& field, const std::string& expected, const std::string& actual) {
  return FieldError(ErrorReason::kInvalidField, field, expected, actual);
}

// The range lies within `source_bytes`.
absl::Status CheckWithin(int64_t offset, int64_t bytes, int64_t source_bytes) {
  if (bytes <= source_bytes && offset <= source_bytes - bytes) return absl::OkStatus();
  return InvalidRegion("size_bytes", absl::StrCat("offset_bytes + size_bytes within the source's ", source_bytes, " bytes"),
                       absl::StrCat(offset, " + ", bytes));
}

// A memfd, mapped and page-locked.
struct Mapping {
  Mapping(void* begin, size_t byte_count) : data(begin), bytes(byte_count) {}
  ~Mapping() {
    locked.reset();
    munmap(data, bytes);
  }
  void* const data;
  const size_t bytes;
  std::unique_ptr<HostMemory> locked;
};

absl::Status ShorterFile(const std::string& field) {
  return InvalidRegion(field, "a named region as long as it was when it was registered", "a shorter one");
}

// Repeats `step(done, left)`, a system call that moves some of the bytes, until all are moved.
template <typename Step>
absl::Status MoveAll(int64_t bytes, const std::string& field, Step&& step) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t moved = step(done, static_cast<size_t>(bytes - done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return ShorterFile(field);
    done += moved;
  }
  return absl::OkStatus();
}

}  // namespace

Region::Region(RegionKind kind, int64_t bytes, std::shared_ptr<RegionCounts> counts, Memory memory)
    : kind_(kind), bytes_(bytes), counts_(std::move(counts)), memory_(std::move(memory)) {
  counts_->regions[static_cast<size_t>(kind_)] += 1;
  counts_->bytes[static_cast<size_t>(kind_)] += bytes_;
}

Region::~Region() {
  memory_ = {};
  counts_->regions[static_cast<size_t>(kind_)] -= 1;
  counts_->bytes[static_cast<size_t>(kind_)] -= bytes_;
  end_->Come();
}

absl::Status Region::Read(int64_t offset, int64_t bytes, void* to, const std::string& field) const {
  return MoveAll(bytes, field, [&](int64_t done, size_t left) {
    return pread(memory_.file.get(), static_cast<uint8_t*>(to) + done, left, memory_.file_offset + offset + done);
  });
}

absl::Status Region::Write(int64_t offset, int64_t bytes, const void* from, const std::string& field) const {
  // A write beyond the end would make the file longer.
  const int64_t begin = memory_.file_offset + offset;
  struct stat status {};
  if (fstat(memory_.file.get(), &status) != 0 || status.st_size < begin + bytes) return ShorterFile(field);
  return MoveAll(bytes, field, [&](int64_t done, size_t left) {
    return pwrite(memory_.file.get(), static_cast<const uint8_t*>(from) + done, left, begin + done);
  });
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

absl::StatusOr<int64_t> CheckSealedMemory(int fd, const std::string& field) {
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
  return status.st_size;
}

OpenedRegion MapDescriptor(LossEngine& engine, std::shared_ptr<RegionCounts> counts, const FileDescriptor& memfd, int64_t offset,
                           int64_t bytes) {
  HEADWATER_ASSIGN_OR_RETURN(const int64_t size, CheckSealedMemory(memfd.get(), "descriptor_token"));
  HEADWATER_RETURN_IF_ERROR(CheckWithin(offset, bytes, size));
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
  auto owner = std::make_shared<Mapping>(mapping, mapping_bytes);
  // Only faster: without it each page is mapped when it is first touched.
  static_cast<void>(madvise(mapping, mapping_bytes, kPopulateWrite));
  HEADWATER_ASSIGN_OR_RETURN(owner->locked, engine.RegisterHostMemory(mapping, static_cast<int64_t>(mapping_bytes)));
  Region::Memory memory = {.owner = std::move(owner), .data = static_cast<uint8_t*>(mapping) + skip};
  return std::make_shared<const Region>(RegionKind::kShared, bytes, std::move(counts), std::move(memory));
}

OpenedRegion OpenNamedRegion(std::shared_ptr<RegionCounts> counts, const std::string& folder, const std::string& name,
                             int64_t offset, int64_t bytes) {
  // Follows no symbolic link, and a hard link is refused below: a client's name stands for a file made under it. A FIFO would
  // block.
  FileDescriptor file(open(absl::StrCat(folder, "/", name).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (!file.valid() || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_nlink != 1) {
    return InvalidRegion("shared_memory_name", "a file under /dev/shm of the server's host that its user may read and write",
                         "none, or something else");
  }
  HEADWATER_RETURN_IF_ERROR(CheckWithin(offset, bytes, status.st_size));
  // Its owner may truncate the file at any time: it is read and written by system calls, which then fail, and never mapped.
  return std::make_shared<const Region>(RegionKind::kNamed, bytes, std::move(counts),
                                        Region::Memory{.file = std::move(file), .file_offset = offset});
}

OpenedRegion OpenDeviceRegion(LossEngine& engine, std::shared_ptr<RegionCounts> counts, const DeviceHandle& memory,
                              std::shared_ptr<const DeviceEvent> event, int64_t bytes) {
  HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<DeviceRegion> opened, engine.OpenDeviceMemory(memory, bytes));
  if (opened->bytes() < bytes) {
    return InvalidRegion("size_bytes", absl::StrCat("at most ", opened->bytes(), ", the bytes of the allocation"),
                         absl::StrCat(bytes));
  }
  return std::make_shared<const Region>(
      RegionKind::kDevice, bytes, std::move(counts),
      Region::Memory{.owner = opened, .data = static_cast<uint8_t*>(opened->data()), .after = std::move(event)});
}

}  // namespace headwater::transport
