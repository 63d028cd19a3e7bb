#include "server/heads/session_registry.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::heads {
namespace {

// Says nothing about the id: it is a secret, and wrong ones come from outside.
absl::Status NotFound() {
  return MakeError(ErrorReason::kSessionNotFound,
                   "there is no such session: it was closed, its lease has ended, or the server has been started again");
}

}  // namespace

SessionRegistry::SessionRegistry(const SessionLimits& limits, std::function<void(const SessionId&)> on_end,
                                 std::function<absl::Time()> clock)
    : limits_(limits), on_end_(std::move(on_end)), clock_(std::move(clock)) {}

absl::StatusOr<SessionRegistry::Grant> SessionRegistry::Open(const std::string& client_name, absl::Duration lease) {
  if (lease <= absl::ZeroDuration()) {
    return MakeError(ErrorReason::kInvalidField, absl::StrCat("lease must be greater than 0, it is ", absl::FormatDuration(lease)),
                     {{"field", "lease"}, {"expected", "> 0"}, {"actual", absl::FormatDuration(lease)}});
  }
  Grant grant;
  grant.lease = std::min(lease, limits_.max_lease);
  // From the kernel itself: no state of ours that a fork could repeat, and no less than what the operating system gives.
  if (getentropy(grant.id.data(), grant.id.size()) != 0) {
    return MakeError(ErrorReason::kInternal, "the operating system gives no random numbers");
  }
  const auto is_full = [this] {
    absl::MutexLock lock(&mutex_);
    return IsFull();
  };
  // Sessions that nobody has looked at since their lease ended must not keep others out.
  if (is_full()) Expire();
  absl::MutexLock lock(&mutex_);
  if (IsFull()) {
    return MakeError(ErrorReason::kQuotaExceeded,
                     absl::StrCat("the server has ", sessions_.size(), " sessions, the maximum is ", limits_.max_sessions),
                     {{"limit", "max_sessions"},
                      {"maximum", absl::StrCat(limits_.max_sessions)},
                      {"actual", absl::StrCat(sessions_.size() + 1)}});
  }
  Session& session = sessions_[grant.id];
  session.client_name = client_name;
  session.lease = grant.lease;
  session.lease_end = clock_() + grant.lease;
  return grant;
}

bool SessionRegistry::IsFull() const { return static_cast<int64_t>(sessions_.size()) >= limits_.max_sessions; }

SessionRegistry::Session* SessionRegistry::FindOpen(const SessionId& id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.ended) return nullptr;
  Session& session = found->second;
  return session.running_calls > 0 || clock_() < session.lease_end ? &session : nullptr;
}

absl::StatusOr<SessionRegistry::Use> SessionRegistry::Begin(const SessionId& id) {
  absl::MutexLock lock(&mutex_);
  Session* session = FindOpen(id);
  if (session == nullptr) return NotFound();
  ++session->running_calls;
  return Use(this, id);
}

void SessionRegistry::End(const SessionId& id) {
  {
    absl::MutexLock lock(&mutex_);
    const auto found = sessions_.find(id);
    Session& session = found->second;  // stays as long as one of its calls runs
    --session.running_calls;
    session.lease_end = clock_() + session.lease;
    if (!session.ended || session.running_calls > 0) return;
    sessions_.erase(found);
  }
  on_end_(id);
}

absl::StatusOr<absl::Duration> SessionRegistry::Renew(const SessionId& id) {
  absl::MutexLock lock(&mutex_);
  Session* session = FindOpen(id);
  if (session == nullptr) return NotFound();
  session->lease_end = clock_() + session->lease;
  return session->lease;
}

bool SessionRegistry::Close(const SessionId& id) {
  {
    absl::MutexLock lock(&mutex_);
    Session* session = FindOpen(id);
    if (session == nullptr) return false;
    if (session->running_calls > 0) {
      session->ended = true;
    } else {
      sessions_.erase(id);
    }
  }
  on_end_(id);
  return true;
}

int64_t SessionRegistry::Expire(std::vector<std::string>* client_names) {
  std::vector<SessionId> expired;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_();
    for (auto entry = sessions_.begin(); entry != sessions_.end();) {
      Session& session = entry->second;
      if (session.running_calls > 0 || now < session.lease_end) {
        ++entry;
        continue;
      }
      expired.push_back(entry->first);
      if (client_names != nullptr) client_names->push_back(std::move(session.client_name));
      entry = sessions_.erase(entry);
    }
  }
  for (const SessionId& id : expired) on_end_(id);
  return static_cast<int64_t>(expired.size());
}

int64_t SessionRegistry::size() const {
  absl::MutexLock lock(&mutex_);
  return std::count_if(sessions_.begin(), sessions_.end(), [](const auto& entry) { return !entry.second.ended; });
}

SessionRegistry::Use::Use(Use&& other) noexcept : registry_(std::exchange(other.registry_, nullptr)), id_(other.id_) {}

SessionRegistry::Use& SessionRegistry::Use::operator=(Use&& other) noexcept {
  if (this == &other) return *this;
  Release();
  registry_ = std::exchange(other.registry_, nullptr);
  id_ = other.id_;
  return *this;
}

SessionRegistry::Use::~Use() { Release(); }

void SessionRegistry::Use::Release() {
  if (registry_ != nullptr) std::exchange(registry_, nullptr)->End(id_);
}

}  // namespace headwater::heads
