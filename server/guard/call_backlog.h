// CallBacklog: the calls of each connection that have come and that the server has not got to yet, and the bound on them.
//
// A client has at most so many calls in progress on a connection as it is told. One that resets calls as soon as it has begun them
// may begin more at once, each of which still costs the server its handler: more of them wait than the client can have in progress.
// That is how it is known, before its calls have been worked off: further ones are refused, which costs next to nothing, and the
// connection is dropped.
//
// Holds hostile_resets_latency_ratio and hostile_memory_growth of docs/benchmarks/trust.md.
#ifndef HEADWATER_SERVER_GUARD_CALL_BACKLOG_H_
#define HEADWATER_SERVER_GUARD_CALL_BACKLOG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::guard {

// Thread-safe.
class CallBacklog {
 public:
  // At most `most` (>= 1) calls of a connection wait. Calls that nobody ever gets to, because they were reset before, are
  // forgotten, `forgotten_a_second` (> 0) of each connection.
  CallBacklog(int64_t most, double forgotten_a_second);
  CallBacklog(const CallBacklog&) = delete;
  CallBacklog& operator=(const CallBacklog&) = delete;

  // What drops the connection of `peer`, which must not call the backlog; on any thread, and not any more once SetDrop() with
  // another has returned. Null: nobody does.
  void SetDrop(std::function<void(const std::string& peer)> drop);

  // A name for a new connection.
  int64_t NewConnection();
  // A call has come. False if it must be refused: more than `most` wait, or have waited before.
  bool OnCall(int64_t connection, absl::Time now);
  // The server has got to a call of the connection, and with it knows whose it is.
  void OnTaken(int64_t connection, const std::string& peer, absl::Time now);

  // Connections that something is known of; others have no call that waits.
  size_t known_connections() const;

 private:
  struct Connection {
    double waiting = 0;
    absl::Time last;   // when `waiting` was that
    std::string peer;  // empty: no call has been taken yet
    bool is_over = false;
    bool is_dropped = false;
  };

  // The connection as it is now.
  Connection& At(int64_t connection, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the connections of which nothing waits.
  void Sweep(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The peer, if it is to be dropped now; else empty.
  static std::string TakeForDrop(Connection& connection);
  void Drop(const std::string& peer);

  const int64_t most_;
  const double forgotten_a_second_;
  mutable absl::Mutex mutex_;
  int64_t last_connection_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t sweep_at_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<int64_t, Connection> connections_ ABSL_GUARDED_BY(mutex_);
  absl::Mutex drop_mutex_;
  std::function<void(const std::string&)> drop_ ABSL_GUARDED_BY(drop_mutex_);
};

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_CALL_BACKLOG_H_
