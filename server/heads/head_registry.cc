#include "server/heads/head_registry.h"

#include <algorithm>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/manifest.h"

namespace headwater::heads {
namespace {

constexpr char kNoneLeft[] = "there is no whole checkpoint";

absl::Status QuotaError(const std::string& message, const char* limit, int64_t maximum, int64_t actual) {
  return MakeError(ErrorReason::kQuotaExceeded, message,
                   {{"limit", limit}, {"maximum", absl::StrCat(maximum)}, {"actual", absl::StrCat(actual)}});
}

// kHeadSpecMismatch unless a call that asks for `wanted` can have `head`.
absl::Status CheckSameSpec(const Head& head, const HeadSpec& wanted) {
  std::vector<checkpoint::SpecDifference> differences = checkpoint::FindSpecDifferences(head.spec(), wanted);
  const auto compare = [&](const char* field, const auto& text_of) {
    if (text_of(head.spec()) != text_of(wanted)) differences.push_back({field, text_of(head.spec()), text_of(wanted)});
  };
  compare("staging_slots", [](const HeadSpec& spec) { return absl::StrCat(spec.staging_slots); });
  compare("parallelism", [](const HeadSpec& spec) { return std::string(ParallelismName(spec.parallelism)); });
  compare("int8_teacher", [](const HeadSpec& spec) { return std::string(spec.int8_teacher ? "true" : "false"); });
  if (differences.empty()) return absl::OkStatus();
  std::string fields, expected, actual;
  for (const auto& [field, here, asked] : differences) {
    const char* const comma = fields.empty() ? "" : ", ";
    absl::StrAppend(&fields, comma, field);
    absl::StrAppend(&expected, comma, field, " ", here);
    absl::StrAppend(&actual, comma, field, " ", asked);
  }
  const std::string name = head.name().ToString();
  return MakeError(ErrorReason::kHeadSpecMismatch, absl::StrCat(name, " exists with ", expected, "; the call asks for ", actual),
                   {{"head", name}, {"field", fields}, {"expected", expected}, {"actual", actual}});
}

// The sum, at most INT64_MAX: plans saturate there.
int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

std::string TenantPrefix(const std::string& tenant) { return HeadName{tenant, ""}.ToString(); }

void AddNote(const std::string& text, std::string& note) { absl::StrAppend(&note, note.empty() ? "" : "; ", text); }

}  // namespace

absl::Status HeadNotFound(const HeadName& name) {
  return MakeError(ErrorReason::kHeadNotFound, absl::StrCat("there is no head ", name.ToString()), {{"head", name.ToString()}});
}

// ---- creating --------------------------------------------------------------------------------------------------------

absl::StatusOr<int64_t> HeadRegistry::PlannedBytes(const HeadSpec& spec) const {
  if (limits_.max_tenant_memory_bytes <= 0) return 0;
  HEADWATER_ASSIGN_OR_RETURN(const MemoryPlan plan, engine_.PlanHead(spec));
  return plan.total_bytes;
}

absl::Status HeadRegistry::Reserve(const HeadName& name, const absl::StatusOr<int64_t>& planned_bytes) {
  if (!planned_bytes.ok()) return planned_bytes.status();
  std::erase_if(departed_, [](const Departed& departed) {
    const std::shared_ptr<Head> head = departed.head.lock();
    return head == nullptr || head->CountUses(0) == 0;
  });
  const std::string prefix = TenantPrefix(name.tenant);
  int64_t tenant_heads = 0;
  int64_t tenant_bytes = 0;
  for (auto entry = heads_.lower_bound(prefix); entry != heads_.end() && absl::StartsWith(entry->first, prefix); ++entry) {
    ++tenant_heads;
    tenant_bytes = SaturatingAdd(tenant_bytes, entry->second.planned_bytes);
  }
  for (const Departed& departed : departed_) {
    if (departed.tenant_prefix != prefix) continue;
    ++tenant_heads;
    tenant_bytes = SaturatingAdd(tenant_bytes, departed.planned_bytes);
  }
  // The tenant's own limits first: the server's limit reveals how many heads others have.
  if (tenant_heads >= limits_.max_heads_per_tenant) {
    return QuotaError(absl::StrCat("tenant ", name.tenant, " has ", tenant_heads, " heads, the maximum of a tenant is ",
                                   limits_.max_heads_per_tenant),
                      "max_heads_per_tenant", limits_.max_heads_per_tenant, tenant_heads + 1);
  }
  const int64_t wanted_bytes = SaturatingAdd(tenant_bytes, *planned_bytes);
  if (limits_.max_tenant_memory_bytes > 0 && wanted_bytes > limits_.max_tenant_memory_bytes) {
    return QuotaError(absl::StrCat("the heads of tenant ", name.tenant, " take ", tenant_bytes, " bytes and this one would take ",
                                   *planned_bytes, ", the maximum of a tenant is ", limits_.max_tenant_memory_bytes),
                      "max_tenant_memory_bytes", limits_.max_tenant_memory_bytes, wanted_bytes);
  }
  const int64_t all_heads = static_cast<int64_t>(heads_.size() + departed_.size());
  if (all_heads >= limits_.max_heads) {
    return QuotaError(absl::StrCat("the server has ", all_heads, " heads, the maximum is ", limits_.max_heads), "max_heads",
                      limits_.max_heads, all_heads + 1);
  }
  heads_[name.ToString()].planned_bytes = *planned_bytes;
  return absl::OkStatus();
}

void HeadRegistry::Settle(const std::string& full_name, std::shared_ptr<Head> head) {
  absl::MutexLock lock(&mutex_);
  if (head == nullptr) {
    const auto found = heads_.find(full_name);
    if (found != heads_.end()) {
      if (found->second.departed.has_value()) departed_.push_back(*std::move(found->second.departed));
      heads_.erase(found);
    }
  } else {
    head->Touch(clock_());
    heads_[full_name].head = std::move(head);
  }
  settled_.WakeAll();
}

absl::StatusOr<HeadRegistry::Created> HeadRegistry::Create(const HeadName& name, const HeadSpec& spec, IfExists if_exists,
                                                           checkpoint::CheckpointStore* store, const WaitLimits& limits) {
  const std::string full_name = name.ToString();
  const absl::StatusOr<int64_t> planned_bytes = PlannedBytes(spec);
  {
    absl::MutexLock lock(&mutex_);
    for (auto found = heads_.find(full_name); found != heads_.end(); found = heads_.find(full_name)) {
      const Entry& entry = found->second;
      if (!entry.leaving && if_exists == IfExists::kFail) {
        return MakeError(ErrorReason::kHeadAlreadyExists, absl::StrCat(full_name, " exists"), {{"head", full_name}});
      }
      if (entry.head != nullptr) {
        HEADWATER_RETURN_IF_ERROR(CheckSameSpec(*entry.head, spec));
        entry.head->Touch(clock_());
        return Created{entry.head, false};
      }
      HEADWATER_RETURN_IF_ERROR(Wait(settled_, mutex_, limits, "waited for a head of that name that was being created or deleted"));
    }
    HEADWATER_RETURN_IF_ERROR(Reserve(name, planned_bytes));
  }
  std::shared_ptr<Head> made;  // null: the name is free again
  const absl::Cleanup settle = [&] { Settle(full_name, made); };
  HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<Head> head, Head::Create(name, spec, engine_, head_limits_, sequencer_));
  // The new head exists, and no call can find it yet. A refused creation must not take from a former head what it can come back
  // from.
  if (store != nullptr) HEADWATER_RETURN_IF_ERROR(store->Forget(name.tenant, name.head));
  made = std::move(head);
  return Created{made, true};
}

// ---- finding ---------------------------------------------------------------------------------------------------------

HeadRegistry::Entries::iterator HeadRegistry::FindEntry(const std::string& full_name) {
  const auto found = heads_.find(full_name);
  return found != heads_.end() && found->second.head != nullptr ? found : heads_.end();
}

absl::StatusOr<std::shared_ptr<Head>> HeadRegistry::Find(const HeadName& name) const {
  const std::string full_name = name.ToString();
  absl::MutexLock lock(&mutex_);
  const auto found = heads_.find(full_name);
  if (found == heads_.end() || found->second.head == nullptr) return HeadNotFound(name);
  found->second.head->Touch(clock_());
  return found->second.head;
}

std::vector<std::shared_ptr<Head>> HeadRegistry::List(const std::string& tenant, const std::string& after, int64_t count) const {
  const std::string prefix = TenantPrefix(tenant);
  std::vector<std::shared_ptr<Head>> heads;
  absl::MutexLock lock(&mutex_);
  for (auto entry = heads_.upper_bound(std::max(after, prefix));
       entry != heads_.end() && absl::StartsWith(entry->first, prefix) && static_cast<int64_t>(heads.size()) < count; ++entry) {
    if (entry->second.head != nullptr) heads.push_back(entry->second.head);
  }
  return heads;
}

std::vector<std::shared_ptr<Head>> HeadRegistry::ListAll() const {
  std::vector<std::shared_ptr<Head>> heads;
  absl::MutexLock lock(&mutex_);
  for (const auto& [full_name, entry] : heads_) {
    if (entry.head != nullptr) heads.push_back(entry.head);
  }
  return heads;
}

int64_t HeadRegistry::DropSession(const SessionId& session) {
  int64_t dropped = 0;
  for (const std::shared_ptr<Head>& head : ListAll()) dropped += head->DropSession(session);
  return dropped;
}

// ---- deleting --------------------------------------------------------------------------------------------------------

std::shared_ptr<Head> HeadRegistry::TakeOut(Entry& entry) {
  entry.departed = Departed{TenantPrefix(entry.head->name().tenant), entry.planned_bytes, entry.head};
  entry.leaving = true;
  return std::move(entry.head);
}

absl::Status HeadRegistry::Delete(const HeadName& name, const std::optional<Epoch>& epoch, bool force,
                                  checkpoint::CheckpointStore* store) {
  const std::string full_name = name.ToString();
  std::shared_ptr<Head> head;
  {
    absl::MutexLock lock(&mutex_);
    if (const auto found = FindEntry(full_name); found != heads_.end()) {
      HEADWATER_RETURN_IF_ERROR(found->second.head->TryRetire(epoch, force));
      head = TakeOut(found->second);
    } else if (store == nullptr || epoch.has_value() || heads_.contains(full_name)) {
      return HeadNotFound(name);
    } else {
      heads_[full_name].leaving = true;
    }
  }
  return Remove(name, std::move(head), store);
}

absl::Status HeadRegistry::Remove(const HeadName& name, std::shared_ptr<Head> head, checkpoint::CheckpointStore* store) {
  const absl::Cleanup settle = [&] { Settle(name.ToString(), nullptr); };
  if (head != nullptr) {
    // Undecided contributions keep this head and others alive until they are dropped.
    head->Retire();
    head.reset();
  } else {
    HEADWATER_ASSIGN_OR_RETURN(const auto comebacks, store->FindComebacks(name.tenant, name.head));
    if (comebacks.empty()) return HeadNotFound(name);
  }
  // No call can save the head any more. Its name is still taken, so the store does not forget a successor instead.
  return store != nullptr ? store->Forget(name.tenant, name.head) : absl::OkStatus();
}

bool HeadRegistry::TryExpire(const std::shared_ptr<Head>& head, absl::Duration timeout, checkpoint::CheckpointStore* store,
                             bool save_first) {
  if (head->last_use() + timeout > clock_()) return false;
  const HeadInfo before = head->Describe();
  if (save_first && before.state == HeadState::kReady) {
    const std::string checkpoint_name = absl::StrCat("idle-", before.open_step.value_or(0));
    if (store == nullptr || !head->Save(before.epoch, *store, checkpoint_name, /*overwrite=*/true).ok()) return false;
  }
  absl::MutexLock lock(&mutex_);
  const auto found = FindEntry(head->name().ToString());
  if (found == heads_.end() || found->second.head != head || head->last_use() + timeout > clock_()) return false;
  // A call that named the head long ago may have changed it since it was saved.
  const HeadInfo now = head->Describe();
  if (now.open_step != before.open_step || now.weight_version != before.weight_version) return false;
  if (!head->TryRetire(before.epoch, /*force=*/true).ok()) return false;
  TakeOut(found->second);
  return true;
}

std::vector<HeadName> HeadRegistry::ExpireIdle(absl::Duration timeout, checkpoint::CheckpointStore* store, bool save_first) {
  std::vector<HeadName> expired;
  for (std::shared_ptr<Head>& head : ListAll()) {
    if (!TryExpire(head, timeout, store, save_first)) continue;
    const HeadName& name = expired.emplace_back(head->name());
    Remove(name, std::move(head), store).IgnoreError();
  }
  return expired;
}

// ---- saving ----------------------------------------------------------------------------------------------------------

std::vector<std::pair<HeadName, absl::Status>> HeadRegistry::SaveChanged(checkpoint::CheckpointStore& store,
                                                                         const std::string& checkpoint_name, absl::Time deadline) {
  std::vector<std::pair<HeadName, absl::Status>> outcomes;
  const auto add = [&outcomes](const Head& head, const absl::StatusOr<bool>& saved) {
    if (!saved.ok() || *saved) outcomes.emplace_back(head.name(), saved.status());
  };
  std::vector<std::shared_ptr<Head>> written;
  for (std::shared_ptr<Head>& head : ListAll()) {
    const absl::StatusOr<bool> saved = head->SaveIfChanged(store, checkpoint_name, deadline, /*waits=*/false);
    if (HasReason(saved.status(), ErrorReason::kDeadlineExceeded) && observability::MonotonicNow() < deadline) {
      written.push_back(std::move(head));
    } else {
      add(*head, saved);
    }
  }
  // One thread for each: a head whose weights are written for long holds up no other.
  std::vector<absl::StatusOr<bool>> saved(written.size());
  std::vector<std::thread> savers;
  for (size_t i = 0; i < written.size(); ++i) {
    savers.emplace_back([&, i] { saved[i] = written[i]->SaveIfChanged(store, checkpoint_name, deadline, /*waits=*/true); });
  }
  for (std::thread& saver : savers) saver.join();
  for (size_t i = 0; i < written.size(); ++i) add(*written[i], saved[i]);
  return outcomes;
}

// ---- coming back -----------------------------------------------------------------------------------------------------

absl::Status HeadRegistry::BringBack(checkpoint::CheckpointStore& store, Comeback& comeback) {
  const std::string full_name = comeback.name.ToString();
  HEADWATER_RETURN_IF_ERROR(ParseHeadName(full_name, "directory").status());
  HEADWATER_ASSIGN_OR_RETURN(const auto found, store.FindComebacks(comeback.name.tenant, comeback.name.head));
  for (const std::string& name : found.damaged) {
    AddNote(absl::StrCat("the manifest of checkpoint ", name, " is damaged"), comeback.note);
    comeback.skipped.emplace_back(name, "the manifest is damaged");
  }
  if (found.newest_first.empty()) return absl::NotFoundError(kNoneLeft);
  const absl::StatusOr<int64_t> planned_bytes = PlannedBytes(found.newest_first.front().spec);
  {
    absl::MutexLock lock(&mutex_);
    if (heads_.contains(full_name)) return absl::AlreadyExistsError("a head of that name is there already");
    HEADWATER_RETURN_IF_ERROR(Reserve(comeback.name, planned_bytes));
  }
  std::shared_ptr<Head> back;  // null: the name is free again
  const absl::Cleanup settle = [&] { Settle(full_name, back); };
  for (const checkpoint::CheckpointInfo& info : found.newest_first) {
    // A new head each time: nothing stays of one that could not be loaded.
    absl::StatusOr<std::shared_ptr<Head>> head = Head::Create(comeback.name, info.spec, engine_, head_limits_, sequencer_);
    if (!head.ok()) return absl::InternalError(absl::StrCat("the head cannot be created: ", head.status().message()));
    const absl::Status status = (*head)->Restore({}, store, info.name, AsLongAsItTakes(), /*comes_back=*/true).status();
    if (status.ok()) {
      comeback.checkpoint = info.name;
      if (const std::string note = (*head)->Describe().restore_note; !note.empty()) AddNote(note, comeback.note);
      back = *std::move(head);
      return absl::OkStatus();
    }
    AddNote(absl::StrCat("checkpoint ", info.name, " cannot be loaded: ", status.message()), comeback.note);
    comeback.skipped.emplace_back(info.name, std::string(status.message()));
  }
  return absl::NotFoundError(kNoneLeft);
}

std::vector<HeadRegistry::Comeback> HeadRegistry::RestoreAll(checkpoint::CheckpointStore& store,
                                                             const std::function<bool()>& cancelled) {
  std::vector<Comeback> comebacks;
  const auto live = store.LiveHeads();
  if (!live.ok()) {
    comebacks.push_back({{}, "", absl::StrCat("the checkpoints cannot be listed: ", live.status().message()), {}});
    return comebacks;
  }
  for (const auto& [tenant, head_id] : *live) {
    if (cancelled()) break;
    Comeback& comeback = comebacks.emplace_back(Comeback{{tenant, head_id}, "", "", {}});
    const absl::Status status = BringBack(store, comeback);
    if (!status.ok()) AddNote(std::string(status.message()), comeback.note);
  }
  return comebacks;
}

}  // namespace headwater::heads
