#include "server/transport/region_registry.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::transport {
namespace {

constexpr char kNamePrefix[] = "headwater-";
constexpr int64_t kAlignment = 64;  // of a region: elements and vectors of them are aligned if their offsets are
constexpr size_t kMaxNameBytes = sizeof(kNamePrefix) - 1 + 200;

// Does not mention the id: the error is the same for another session's region and for a removed one.
absl::Status NotFound() {
  return MakeError(ErrorReason::kRegionNotFound,
                   "the session has no such region: it was unregistered, or registered in another session; register it again");
}

absl::StatusOr<std::string> NewId() {
  std::string bytes(16, '\0');
  if (getentropy(bytes.data(), bytes.size()) != 0) {
    return MakeError(ErrorReason::kInternal, "the operating system gives no random numbers");
  }
  return absl::BytesToHexString(bytes);
}

}  // namespace

bool IsRegionName(const std::string& name) {
  const size_t prefix = sizeof(kNamePrefix) - 1;
  return name.size() > prefix && name.size() <= kMaxNameBytes && name.compare(0, prefix, kNamePrefix) == 0 &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
         });
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
  if (bytes < 1) return FieldError(ErrorReason::kInvalidField, "size_bytes", "at least 1", absl::StrCat(bytes));
  if (offset < 0 || offset > std::numeric_limits<int64_t>::max() - bytes) {
    return FieldError(ErrorReason::kInvalidField, "offset_bytes", absl::StrCat("a number in [0, 2^63 - 1 - ", bytes, "]"),
                      absl::StrCat(offset));
  }
  if (offset % kAlignment != 0) {
    return FieldError(ErrorReason::kInvalidField, "offset_bytes", absl::StrCat("a multiple of ", kAlignment), absl::StrCat(offset));
  }
  if (bytes > limits_.max_region_bytes) {
    return MakeError(ErrorReason::kLimitExceeded,
                     absl::StrCat("size_bytes: expected at most ", limits_.max_region_bytes, " (max_region_bytes), got ", bytes),
                     {{"field", "size_bytes"},
                      {"limit", "max_region_bytes"},
                      {"maximum", absl::StrCat(limits_.max_region_bytes)},
                      {"actual", absl::StrCat(bytes)}});
  }
  HEADWATER_ASSIGN_OR_RETURN(auto id, NewId());
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
    return FieldError(ErrorReason::kInvalidField, absl::StrCat(field, ".offset_bytes"),
                      absl::StrCat(bytes, " bytes of rows within the region's ", size, " bytes"),
                      absl::StrCat("an offset of ", offset));
  }
  if (offset % element_bytes != 0) {
    return FieldError(ErrorReason::kInvalidField, absl::StrCat(field, ".offset_bytes"),
                      absl::StrCat("a multiple of the element's ", element_bytes, " bytes"), absl::StrCat(offset));
  }
  use.offset_ = offset;
  use.bytes_ = bytes;
  use.access_ = access;
  use.field_ = field;
  return use;
}

RegionRegistry::Totals RegionRegistry::totals() const {
  Totals totals;
  for (size_t kind = 0; kind < totals.regions.size(); ++kind) {
    totals.regions[kind] = counts_->regions[kind].load();
    totals.bytes[kind] = counts_->bytes[kind].load();
  }
  return totals;
}

}  // namespace headwater::transport
