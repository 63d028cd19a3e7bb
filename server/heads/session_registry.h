// SessionRegistry: client processes by secret id, each with a lease.
//
//   SessionRegistry sessions(limits, [&](const SessionId& id, auto&&...) { return heads.DropSession(id); });
//   auto grant = sessions.Open("trainer-0", absl::Seconds(30));
//   auto use = sessions.Begin(grant->id);  // held as long as the call runs
//
// A session lives until it is closed or its lease ends; a lease does not end while a call of the session runs. `on_end` drops what
// an ended session leaves undecided. The registry calls it without its lock held: when the session ends, and once more when the
// last call that was running then has ended. Thread-safe.
#ifndef HEADWATER_SERVER_HEADS_SESSION_REGISTRY_H_
#define HEADWATER_SERVER_HEADS_SESSION_REGISTRY_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {

// Random and secret: knowing it makes a client the session's owner.
using SessionId = std::array<uint8_t, 32>;

struct SessionLimits {
  int64_t max_sessions = 4096;  // sessions that have ended but still have running calls included
  absl::Duration max_lease = absl::Minutes(10);
};

class SessionRegistry {
 public:
  enum class End { kClosed, kExpired };
  // Drops what the session has left undecided. Returns how many contributions that were.
  using OnEnd = std::function<int64_t(const SessionId& id, const std::string& client_name, End how)>;

  // `on_end` may be called from any thread that calls the registry, until the registry is destroyed. `clock` is for tests; only
  // differences of its times matter.
  SessionRegistry(const SessionLimits& limits, OnEnd on_end, std::function<absl::Time()> clock = observability::MonotonicNow)
      : limits_(limits), on_end_(std::move(on_end)), clock_(std::move(clock)) {}

  struct Grant {
    SessionId id;
    absl::Duration lease;
  };
  struct Expired {
    std::string client_name;
    int64_t dropped = 0;  // contributions that were undecided
  };
  // Opens a session with a lease of min(lease, max_lease). kInvalidField unless `lease` > 0; kQuotaExceeded. `expired` (null,
  // or empty) gets the sessions that Open() has ended to make room, whatever Open() returns: Expire() does not report those.
  absl::StatusOr<Grant> Open(const std::string& client_name, absl::Duration lease, std::vector<Expired>* expired = nullptr);

  // A running call of a session: the lease does not end while it lives, and counts from its end. Must not outlive the registry.
  struct EndUse {
    SessionRegistry* registry = nullptr;
    void operator()(const SessionId* id) const {
      registry->EndCall(*id);
      delete id;
    }
  };
  using Use = std::unique_ptr<const SessionId, EndUse>;
  // kSessionNotFound, also for one whose lease has ended but that Expire() has not yet seen.
  absl::StatusOr<Use> Begin(const SessionId& id);
  // Renews and returns the lease. kSessionNotFound.
  absl::StatusOr<absl::Duration> Renew(const SessionId& id);
  // Ends a session. False if there was none.
  bool Close(const SessionId& id);
  // Ends the sessions whose lease has ended, and returns them. To be called now and then.
  std::vector<Expired> Expire();
  int64_t size() const;

 private:
  struct Session {
    std::string client_name;
    absl::Duration lease;
    absl::Time lease_end;
    int64_t running_calls = 0;
    bool ended = false;  // gone for all calls except the running ones; forgotten after its last on_end()
  };

  bool IsFull() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<int64_t>(sessions_.size()) >= limits_.max_sessions;
  }
  // The session if it is open and its lease has not ended, else null.
  Session* FindOpen(const SessionId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndCall(const SessionId& id);
  // Calls on_end() for a session that has ended and has no calls, and forgets the session. Returns what on_end() returns.
  int64_t Tell(const SessionId& id, const std::string& client_name, End how);
  static bool IsOver(const Session& session, absl::Time now);

  const SessionLimits limits_;
  const OnEnd on_end_;
  const std::function<absl::Time()> clock_;
  mutable absl::Mutex mutex_;
  std::map<SessionId, Session> sessions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_SESSION_REGISTRY_H_
