#include "server/heads/head_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::heads {
namespace {

absl::Status NotFound(const std::string& name) {
  return MakeError(ErrorReason::kHeadNotFound, absl::StrCat("there is no head ", name), {{"head", name}});
}

}  // namespace

HeadRegistry::HeadRegistry(LossEngine& engine, int64_t max_heads, const HeadLimits& limits)
    : engine_(engine), max_heads_(max_heads), limits_(limits) {}

absl::StatusOr<std::shared_ptr<Head>> HeadRegistry::Create(const HeadName& name, const HeadSpec& spec) {
  const std::string full_name = name.ToString();
  {
    absl::MutexLock lock(&mutex_);
    if (heads_.contains(full_name)) {
      return MakeError(ErrorReason::kHeadAlreadyExists, absl::StrCat(full_name, " exists"), {{"head", full_name}});
    }
    if (static_cast<int64_t>(heads_.size()) >= max_heads_) {
      return MakeError(
          ErrorReason::kQuotaExceeded, absl::StrCat("the server has ", heads_.size(), " heads, the maximum is ", max_heads_),
          {{"limit", "max_heads"}, {"maximum", absl::StrCat(max_heads_)}, {"actual", absl::StrCat(heads_.size() + 1)}});
    }
    heads_[full_name] = nullptr;
  }
  absl::StatusOr<std::shared_ptr<Head>> head = Head::Create(name, spec, engine_, limits_);
  absl::MutexLock lock(&mutex_);
  if (head.ok()) {
    heads_[full_name] = *head;
  } else {
    heads_.erase(full_name);
  }
  return head;
}

absl::StatusOr<std::shared_ptr<Head>> HeadRegistry::Find(const HeadName& name) const {
  const std::string full_name = name.ToString();
  absl::MutexLock lock(&mutex_);
  const auto found = heads_.find(full_name);
  if (found == heads_.end() || found->second == nullptr) return NotFound(full_name);
  return found->second;
}

std::vector<std::shared_ptr<Head>> HeadRegistry::List(const std::string& tenant, const std::string& after, int64_t count) const {
  const std::string prefix = HeadName{tenant, ""}.ToString();
  std::vector<std::shared_ptr<Head>> heads;
  absl::MutexLock lock(&mutex_);
  for (auto entry = after.empty() ? heads_.lower_bound(prefix) : heads_.upper_bound(after);
       entry != heads_.end() && static_cast<int64_t>(heads.size()) < count; ++entry) {
    if (entry->first < prefix) continue;
    if (entry->first.compare(0, prefix.size(), prefix) != 0) break;
    if (entry->second != nullptr) heads.push_back(entry->second);
  }
  return heads;
}

absl::Status HeadRegistry::Delete(const HeadName& name, const std::optional<Epoch>& epoch, bool force) {
  const std::string full_name = name.ToString();
  // Freed after the lock is released: large memory takes its time.
  std::shared_ptr<Head> head;
  absl::MutexLock lock(&mutex_);
  const auto found = heads_.find(full_name);
  if (found == heads_.end() || found->second == nullptr) return NotFound(full_name);
  if (absl::Status status = found->second->TryRetire(epoch, force); !status.ok()) return status;
  head = std::move(found->second);
  heads_.erase(found);
  return absl::OkStatus();
}

int64_t HeadRegistry::size() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(heads_.size());
}

}  // namespace headwater::heads
