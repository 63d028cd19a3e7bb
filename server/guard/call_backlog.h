// CallBacklog: the calls of each connection that have arrived and that the server has not started, and the bound on them.
//
// More calls wait than a client may have in progress only if it resets them (docs/adr/0018-limits.md). Holds
// hostile_resets_latency_ratio and hostile_memory_growth of docs/benchmarks/trust.md.
#ifndef HEADWATER_SERVER_GUARD_CALL_BACKLOG_H_
#define HEADWATER_SERVER_GUARD_CALL_BACKLOG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::guard {

// Thread-safe.
class CallBacklog {
 public:
  // At most `most` (>= 1) calls of a connection wait. Calls that were reset before the server starts them are forgotten, at
  // `forgotten_a_second` (> 0) for each connection. `drop` drops the connection of `peer`; any thread, and it must not call the
  // backlog.
  CallBacklog(int64_t most, double forgotten_a_second, std::function<void(const std::string& peer)> drop)
      : most_(most), forgotten_a_second_(forgotten_a_second), drop_(std::move(drop)) {}
  CallBacklog(const CallBacklog&) = delete;
  CallBacklog& operator=(const CallBacklog&) = delete;

  // A name for a new connection.
  int64_t NewConnection();
  // A call has arrived. False if it must be refused: more than `most` wait, or have waited before.
  bool OnCall(int64_t connection, absl::Time now);
  // The server has started a call of the connection, which reveals its peer.
  void OnTaken(int64_t connection, const std::string& peer, absl::Time now);

  // Connections with a record; others have no waiting call.
  size_t known_connections() const;

 private:
  struct Connection {
    double waiting = 0;
    absl::Time last;   // when `waiting` was that
    std::string peer;  // empty: no call has been taken yet
    bool is_over = false;
    bool is_dropped = false;
  };

  static constexpr size_t kLeastSweep = 1024;  // connections

  // The connection's record, updated to `now`.
  Connection& At(int64_t connection, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the connections without waiting calls.
  void Sweep(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The peer, if it is to be dropped now; else empty.
  static std::string TakeForDrop(Connection& connection);

  const int64_t most_;
  const double forgotten_a_second_;
  const std::function<void(const std::string& peer)> drop_;
  mutable absl::Mutex mutex_;
  int64_t last_connection_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t sweep_at_ ABSL_GUARDED_BY(mutex_) = kLeastSweep;
  std::unordered_map<int64_t, Connection> connections_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_CALL_BACKLOG_H_
