#include "server/transport/region_registry.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::transport {
namespace {

constexpr int64_t kTmpfsMagic = 0x01021994;
constexpr int kNeededSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status InvalidRegion(const std::string& field, const std::string& expected, const std::string& actual) {
  return FieldError(ErrorReason::kInvalidField, field, expected, actual);
}

absl::Status CheckWithin(int64_t offset, int64_t bytes, int64_t source_bytes) {
  if (bytes <= source_bytes && offset <= source_bytes - bytes) return absl::OkStatus();
  return InvalidRegion("size_bytes", absl::StrCat("offset_bytes + size_bytes within the source's ", source_bytes, " bytes"),
                       absl::StrCat(offset, " + ", bytes));
}

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

namespace {

// The openers: 0 <= offset, 1 <= bytes, and their sum does not wrap.
OpenedRegion MapDescriptor(LossEngine& engine, std::shared_ptr<RegionCounts> counts, const FileDescriptor& memfd, int64_t offset,
                           int64_t bytes) {
  HEADWATER_ASSIGN_OR_RETURN(const int64_t size, CheckSealedMemory(memfd.get(), "descriptor_token"));
  HEADWATER_RETURN_IF_ERROR(CheckWithin(offset, bytes, size));
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t skip = offset % page;
  const int64_t pages = (skip + bytes + page - 1) / page;  // cannot wrap: the file is that long
  const size_t mapping_bytes = static_cast<size_t>(pages * page);
  // Populated: else each page would be mapped when it is first touched, which is slower.
  constexpr int kFlags = MAP_SHARED | MAP_POPULATE;
  void* const mapping = mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, kFlags, memfd.get(), offset - skip);
  if (mapping == MAP_FAILED) {
    return MakeError(ErrorReason::kMemoryBudgetExceeded,
                     absl::StrCat("the system does not map ", bytes, " bytes of shared memory for this server"),
                     {{"requestedBytes", absl::StrCat(bytes)}});
  }
  const std::shared_ptr<void> mapped(mapping, [mapping_bytes](void* begin) { munmap(begin, mapping_bytes); });
  HEADWATER_ASSIGN_OR_RETURN(auto locked, engine.RegisterHostMemory(mapping, static_cast<int64_t>(mapping_bytes)));
  // Unlocked before it is unmapped.
  std::shared_ptr<void> owner(locked.release(), [mapped](HostMemory* memory) { delete memory; });
  return std::make_shared<const Region>(RegionKind::kShared, bytes, std::move(counts),
                                        Region::Memory{.owner = std::move(owner), .data = static_cast<uint8_t*>(mapping) + skip});
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

constexpr char kNamePrefix[] = "headwater-";
constexpr int64_t kAlignment = 64;  // of a region: elements and vectors of them are aligned if their offsets are
constexpr size_t kMaxNameBytes = sizeof(kNamePrefix) - 1 + 200;

// Does not mention the id: the error is the same for another session's region and for a removed one.
absl::Status NotFound() {
  return MakeError(ErrorReason::kRegionNotFound,
                   "the session has no such region: it was unregistered, or registered in another session; register it again");
}

std::string NewId() {
  std::string bytes(16, '\0');
  if (getentropy(bytes.data(), bytes.size()) != 0) std::abort();  // the kernel always gives so few bytes
  return absl::BytesToHexString(bytes);
}

}  // namespace

bool IsRegionName(const std::string& name) {
  const size_t prefix = sizeof(kNamePrefix) - 1;
  return name.size() > prefix && name.size() <= kMaxNameBytes && name.compare(0, prefix, kNamePrefix) == 0 &&
         std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-'; });
}

absl::Status RegionUse::Prepare() {
  if (kind() != RegionKind::kNamed) {
    data_ = region_->data() + offset_;
    return absl::OkStatus();
  }
  HEADWATER_ASSIGN_OR_RETURN(copy_, engine_->AllocateHostMemory(std::max<int64_t>(1, bytes_)));
  data_ = copy_->data();
  return access_ == RegionAccess::kRead ? region_->Read(offset_, bytes_, data_, field_) : absl::OkStatus();
}

absl::Status RegionUse::Finish() {
  if (access_ == RegionAccess::kRead || copy_ == nullptr) return absl::OkStatus();
  return region_->Write(offset_, bytes_, data_, field_);
}

bool RegionUse::Overlap(const RegionUse& a, const RegionUse& b) {
  return a.region_ == b.region_ && a.bytes_ > 0 && b.bytes_ > 0 && a.offset_ < b.offset_ + b.bytes_ &&
         b.offset_ < a.offset_ + a.bytes_;
}

absl::StatusOr<std::string> RegionRegistry::Add(const RegionOwner& owner, int64_t offset, int64_t bytes,
                                                const std::function<OpenedRegion()>& open) {
  if (bytes < 1) return InvalidRegion("size_bytes", "at least 1", absl::StrCat(bytes));
  if (offset < 0 || offset > std::numeric_limits<int64_t>::max() - bytes) {
    return InvalidRegion("offset_bytes", absl::StrCat("a number in [0, 2^63 - 1 - ", bytes, "]"), absl::StrCat(offset));
  }
  if (offset % kAlignment != 0) {
    return InvalidRegion("offset_bytes", absl::StrCat("a multiple of ", kAlignment), absl::StrCat(offset));
  }
  if (bytes > limits_.max_region_bytes) {
    return MakeError(ErrorReason::kLimitExceeded,
                     absl::StrCat("size_bytes: expected at most ", limits_.max_region_bytes, " (max_region_bytes), got ", bytes),
                     {{"field", "size_bytes"},
                      {"limit", "max_region_bytes"},
                      {"maximum", absl::StrCat(limits_.max_region_bytes)},
                      {"actual", absl::StrCat(bytes)}});
  }
  const std::string id = NewId();
  const std::pair key(owner, id);
  {
    absl::MutexLock lock(&mutex_);
    int64_t count = 0;
    for (auto entry = regions_.lower_bound({owner, ""}); entry != regions_.end() && entry->first.first == owner; ++entry) ++count;
    if (count >= limits_.max_session_regions) {
      return MakeError(ErrorReason::kQuotaExceeded,
                       absl::StrCat("the session has ", count, " regions, the maximum is ", limits_.max_session_regions,
                                    "; unregister one, or put several tensors into one region"),
                       {{"limit", "max_session_regions"},
                        {"maximum", absl::StrCat(limits_.max_session_regions)},
                        {"actual", absl::StrCat(count + 1)}});
    }
    regions_[key] = nullptr;
  }
  OpenedRegion region = open();
  absl::MutexLock lock(&mutex_);
  if (region.ok()) {
    regions_[key] = *std::move(region);
    return id;
  }
  regions_.erase(key);
  return region.status();
}

absl::StatusOr<std::string> RegionRegistry::AddDescriptor(const RegionOwner& owner, FileDescriptor memfd, int64_t offset,
                                                          int64_t bytes) {
  return Add(owner, offset, bytes, [&] { return MapDescriptor(engine_, counts_, memfd, offset, bytes); });
}

absl::StatusOr<std::string> RegionRegistry::AddNamed(const RegionOwner& owner, const std::string& name, int64_t offset,
                                                     int64_t bytes, const std::string& folder) {
  if (!IsRegionName(name)) {
    return MakeError(ErrorReason::kInvalidName, "shared_memory_name: expected `headwater-` and 1 to 200 of [A-Za-z0-9._-]",
                     {{"field", "shared_memory_name"}});
  }
  return Add(owner, offset, bytes, [&] { return OpenNamedRegion(counts_, folder, name, offset, bytes); });
}

absl::StatusOr<std::string> RegionRegistry::AddDevice(const RegionOwner& owner, const DeviceHandle& memory,
                                                      const std::optional<DeviceHandle>& event, int64_t bytes) {
  return Add(owner, 0, bytes, [&]() -> OpenedRegion {
    std::shared_ptr<const DeviceEvent> after;
    if (event.has_value()) {
      HEADWATER_ASSIGN_OR_RETURN(after, OpenEvent(*event));
    }
    return OpenDeviceRegion(engine_, counts_, memory, std::move(after), bytes);
  });
}

absl::StatusOr<std::shared_ptr<const DeviceEvent>> RegionRegistry::OpenEvent(const DeviceHandle& handle) {
  absl::MutexLock lock(&events_mutex_);
  std::erase_if(events_, [](const auto& entry) { return entry.second.expired(); });
  if (auto event = events_[handle].lock(); event != nullptr) return event;
  HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceEvent> event, engine_.OpenDeviceEvent(handle));
  events_[handle] = event;
  return event;
}

absl::StatusOr<std::shared_ptr<RegionEnd>> RegionRegistry::Remove(const RegionOwner& owner, const std::string& id) {
  std::shared_ptr<const Region> region;  // released without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = regions_.find({owner, id});
  if (found == regions_.end() || found->second == nullptr) return NotFound();
  region = std::move(found->second);
  regions_.erase(found);
  return region->end();
}

int64_t RegionRegistry::DropOwner(const RegionOwner& owner) {
  std::vector<std::shared_ptr<const Region>> dropped;  // given back without the lock
  absl::MutexLock lock(&mutex_);
  for (auto entry = regions_.lower_bound({owner, ""}); entry != regions_.end() && entry->first.first == owner;) {
    dropped.push_back(std::move(entry->second));
    entry = regions_.erase(entry);
  }
  return static_cast<int64_t>(dropped.size());
}

absl::StatusOr<RegionUse> RegionRegistry::Find(const RegionOwner& owner, const std::string& id, int64_t offset, int64_t bytes,
                                               RegionAccess access, int64_t element_bytes, const std::string& field) const {
  RegionUse use;
  use.engine_ = &engine_;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = regions_.find({owner, id});
    if (found == regions_.end() || found->second == nullptr) return NotFound();
    use.region_ = found->second;
  }
  const int64_t size = use.region_->bytes();
  if (bytes < 0 || offset < 0 || bytes > size || offset > size - bytes) {
    return InvalidRegion(field + ".offset_bytes", absl::StrCat(bytes, " bytes of rows within the region's ", size, " bytes"),
                         absl::StrCat("an offset of ", offset));
  }
  if (offset % element_bytes != 0) {
    return InvalidRegion(field + ".offset_bytes", absl::StrCat("a multiple of the element's ", element_bytes, " bytes"),
                         absl::StrCat(offset));
  }
  use.offset_ = offset;
  use.bytes_ = bytes;
  use.access_ = access;
  use.field_ = field;
  return use;
}

}  // namespace headwater::transport
