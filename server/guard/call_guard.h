// Every call is counted for the CallBacklog twice, at arrival and at its start, and checked before its handler.
//
// A call arrives when gRPC has read its metadata, in the credentials' metadata processor. It has no handler yet, and the client may
// have reset it. CallGuard counts the start, and guards the access to gRPC's built-in services (health, reflection), whose handlers
// are not ours. Our own services use service::RpcScope::Begin() instead, which reports more. CallGuard bounds the health watches of
// each group of ports (Limits::max_health_watches): a watch never ends by itself, and needs no token.
//
// Holds hostile_resets_latency_ratio and hostile_memory_growth of docs/benchmarks/trust.md.
#ifndef HEADWATER_SERVER_GUARD_CALL_GUARD_H_
#define HEADWATER_SERVER_GUARD_CALL_GUARD_H_

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/server_interceptor.h>
#include <grpcpp/support/string_ref.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::guard {

// Bounds the log lines of failed calls, so that a client cannot fill the disk, or a processor, with refusals. Holds
// hostile_resets_latency_ratio of docs/benchmarks/trust.md, where every call fails. Thread-safe.
class LineBudget {
 public:
  // `a_second` lines (> 0) each second, and as many as `at_once` after a quiet time.
  LineBudget(double a_second, double at_once) : a_second_(a_second), at_once_(at_once), left_(at_once) {}

  // The number of lines dropped since the last one written, if one may be written now; nullopt: this line is dropped too.
  std::optional<int64_t> Take(absl::Time now = observability::MonotonicNow()) {
    absl::MutexLock lock(&mutex_);
    left_ = std::min(at_once_, left_ + a_second_ * std::max(0.0, absl::ToDoubleSeconds(now - last_)));
    last_ = now;
    if (left_ < 1) {
      ++left_out_;
      return std::nullopt;
    }
    left_ -= 1;
    const int64_t left_out = left_out_;
    left_out_ = 0;
    return left_out;
  }

 private:
  const double a_second_;
  const double at_once_;
  absl::Mutex mutex_;
  double left_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_ ABSL_GUARDED_BY(mutex_) = observability::MonotonicNow();
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The process's budget for lines of calls that were refused, cancelled or cut off.
inline LineBudget& FailedCallLines() {
  static auto* const budget = new LineBudget(100, 1000);
  return *budget;
}

// The calls of each connection that have arrived and that the server has not started, and the bound on them. More calls wait than a
// client may have in progress only if it resets them (docs/adr/0018-limits.md). Thread-safe.
class CallBacklog {
 public:
  // At most `most` (>= 1) calls of a connection wait. Calls that were reset before the server starts them are forgotten, at
  // `forgotten_a_second` (> 0) for each connection. `drop` drops the connection of `peer`; any thread, and it must not call the
  // backlog.
  CallBacklog(int64_t most, double forgotten_a_second, std::function<void(const std::string& peer)> drop)
      : most_(most), forgotten_a_second_(forgotten_a_second), drop_(std::move(drop)) {}

  // A name for a new connection.
  int64_t NewConnection() {
    absl::MutexLock lock(&mutex_);
    return ++last_connection_;
  }
  // A call has arrived. False if it must be refused: more than `most` wait, or have waited before.
  bool OnCall(int64_t connection, absl::Time now);
  // The server has started a call of the connection, which reveals its peer.
  void OnTaken(int64_t connection, const std::string& peer, absl::Time now);

  // Connections with a record; others have no waiting call.
  size_t known_connections() const {
    absl::MutexLock lock(&mutex_);
    return connections_.size();
  }

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

// Takes over `credentials`. Each connection gets a number from the backlog. With `is_counted`, a call that the backlog refuses
// fails with RESOURCE_EXHAUSTED.
std::shared_ptr<grpc::ServerCredentials> CountCalls(grpc_server_credentials* credentials, std::shared_ptr<CallBacklog> backlog,
                                                    bool is_counted = true);

// The number of the call's connection; nullopt for null, and for a call with other credentials.
std::optional<int64_t> ConnectionOf(grpc_call* call);

class CallGuard final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  using Metadata = std::multimap<grpc::string_ref, grpc::string_ref>;
  // Whether a call of `method` with this metadata may be made. Any thread, until the server that the guard is given to is gone.
  using Authorize = std::function<absl::Status(const char* method, const Metadata& metadata)>;

  // The backlog must outlive the guard's server.
  CallGuard(CallBacklog& backlog, Authorize authorize, int64_t max_health_watches)
      : backlog_(backlog), authorize_(std::move(authorize)), max_health_watches_(max_health_watches) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override;

 private:
  class Guard;

  CallBacklog& backlog_;
  const Authorize authorize_;
  const int64_t max_health_watches_;
  const std::shared_ptr<std::atomic<int64_t>> watches_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_CALL_GUARD_H_
