#include "server/heads/session_registry.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
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

absl::StatusOr<SessionRegistry::Grant> SessionRegistry::Open(const std::string& client_name, absl::Duration lease,
                                                             std::vector<Expired>* expired) {
  if (lease <= absl::ZeroDuration()) return FieldError(ErrorReason::kInvalidField, "lease", "> 0", absl::FormatDuration(lease));
  Grant grant;
  grant.lease = std::min(lease, limits_.max_lease);
  // From the kernel itself: a fork cannot repeat it, and it is as good as the operating system's randomness.
  if (getentropy(grant.id.data(), grant.id.size()) != 0) std::abort();
  const auto is_full = [this] {
    absl::MutexLock lock(&mutex_);
    return IsFull();
  };
  // Sessions whose lease has ended unnoticed must not keep others out.
  if (is_full()) {
    std::vector<Expired> ended = Expire();
    if (expired != nullptr) *expired = std::move(ended);
  }
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

bool SessionRegistry::IsOver(const Session& session, absl::Time now) {
  return session.running_calls == 0 && !session.ended && now >= session.lease_end;
}

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
  return Use(new SessionId(id), EndUse{this});
}

void SessionRegistry::EndCall(const SessionId& id) {
  std::string client_name;
  {
    absl::MutexLock lock(&mutex_);
    Session& session = sessions_.find(id)->second;  // stays as long as one of its calls runs
    --session.running_calls;
    session.lease_end = clock_() + session.lease;
    if (!session.ended || session.running_calls > 0) return;
    client_name = session.client_name;
  }
  Tell(id, client_name, End::kClosed);
}

int64_t SessionRegistry::Tell(const SessionId& id, const std::string& client_name, End how) {
  const int64_t dropped = on_end_(id, client_name, how);
  absl::MutexLock lock(&mutex_);
  sessions_.erase(id);
  return dropped;
}

absl::StatusOr<absl::Duration> SessionRegistry::Renew(const SessionId& id) {
  absl::MutexLock lock(&mutex_);
  Session* session = FindOpen(id);
  if (session == nullptr) return NotFound();
  session->lease_end = clock_() + session->lease;
  return session->lease;
}

bool SessionRegistry::Close(const SessionId& id) {
  bool runs = false;
  std::string client_name;
  {
    absl::MutexLock lock(&mutex_);
    Session* session = FindOpen(id);
    if (session == nullptr) return false;
    session->ended = true;
    runs = session->running_calls > 0;
    client_name = session->client_name;
  }
  runs ? on_end_(id, client_name, End::kClosed) : Tell(id, client_name, End::kClosed);
  return true;
}

std::vector<SessionRegistry::Expired> SessionRegistry::Expire() {
  std::vector<std::pair<SessionId, std::string>> over;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_();
    for (auto& [id, session] : sessions_) {
      if (!IsOver(session, now)) continue;
      session.ended = true;
      over.emplace_back(id, session.client_name);
    }
  }
  std::vector<Expired> expired;
  for (const auto& [id, client_name] : over) expired.push_back({client_name, Tell(id, client_name, End::kExpired)});
  return expired;
}

int64_t SessionRegistry::size() const {
  absl::MutexLock lock(&mutex_);
  return std::count_if(sessions_.begin(), sessions_.end(), [](const auto& entry) { return !entry.second.ended; });
}

}  // namespace headwater::heads
