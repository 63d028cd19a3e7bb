// RpcScope: the frame around the work of every RPC: admission, request id, log line, metrics, mapping of the error.
#ifndef HEADWATER_SERVER_SERVICE_CALL_RPC_SCOPE_H_
#define HEADWATER_SERVER_SERVICE_CALL_RPC_SCOPE_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>
#include <grpcpp/support/string_ref.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/heads/head.h"
#include "server/observability/call_trace.h"
#include "server/observability/metrics.h"
#include "server/scheduler/waiting.h"
#include "server/service/access/access.h"
#include "server/service/server_core.h"

namespace headwater::service {

// Metadata key of the request id, which is echoed in the initial metadata. It is the client's if that is 1 to 128 characters of
// [A-Za-z0-9._:/-], and made here otherwise.
inline constexpr char kRequestIdKey[] = "x-request-id";

// A call may also bring the W3C metadata `traceparent`, and the log names its trace. If the caller records the trace, micro-batches
// and steps are written to files (ServerOptions::trace_dir).

// Where calls come in: the core that serves them, and the role of the ports. Without a role it takes the calls that all ports take.
struct Entrance {
  Entrance(ServerCore& server_core, PortRole port_role = PortRole::kData) : core(server_core), role(port_role) {}
  ServerCore& core;
  PortRole role;
};

// The tokens that came with a call.
std::vector<absl::string_view> AuthorizationOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata);

// The one place where errors become gRPC statuses, with code and message of `status`. The trailer grpc-status-details-bin has an
// RpcStatus with one ErrorInfo and, if the metadata says `retryAfterMs`, one RetryInfo. An error without a reason, which our own
// code does not make, is INTERNAL with a general text: its own text belongs into the log. Texts are cut so that the trailers stay
// below gRPC's default of 8 KiB.
grpc::Status ToGrpcStatus(const absl::Status& status);

class RpcScope {
 public:
  // One scope for each call. `waiter` waits for it; null: the thread that runs it.
  RpcScope(const Entrance& entrance, grpc::ServerContextBase& context, observability::RpcMethod method,
           scheduler::Waiter* waiter = nullptr);

  // Before anything else: whether the call may be made, and the server takes calls. GetServerInfo and Join are taken in every
  // phase. kUnauthenticated, kPermissionDenied, and the errors of ServerCore::Admit().
  absl::Status Begin();
  ServerCore& core() const { return entrance_.core; }
  grpc::ServerContextBase& context() { return context_; }
  // The call's caller. Once Begin() has returned OK.
  const Caller& caller() const { return caller_; }
  // The heads that the call has found, and its session. They are in use until it ends, also while it waits.
  std::vector<heads::HeadUse>& heads() { return heads_; }
  heads::SessionRegistry::Use& session() { return session_; }

  // For StreamWatchdog: whether the caller is still allowed its call; its token may have been withdrawn. Valid as long as the core.
  std::function<absl::Status()> AllowedStill() const;

  const std::string& request_id() const { return request_id_; }
  // Null: the call is not traced.
  const std::shared_ptr<observability::CallTrace>& trace() const { return trace_; }

  // Names the head in the log line.
  void set_head(const std::string& name) { head_ = name; }

  // Marks the scope's call as the one that this thread runs, as long as it lives.
  class OnThread {
   public:
    explicit OnThread(const RpcScope& scope) : outer_(std::exchange(current_, &scope)) {}
    ~OnThread() { current_ = outer_; }
    OnThread(const OnThread&) = delete;
    OnThread& operator=(const OnThread&) = delete;

   private:
    const RpcScope* const outer_;
  };
  // Method, request id and head of the call that this thread runs; empty without a call. For logs.
  struct Label {
    std::string method, request_id, head;
  };
  static Label CurrentLabel();
  // Identity of the client, for the fair queue and the fair budget: its connection. The peer alone would not do, which is the same
  // for all connections of a Unix socket.
  std::string client() const;
  absl::Time start_time() const { return start_time_; }
  // Bounds of a wait of this call: its deadline (of observability::MonotonicNow()), its client, and the engine's device; for a step
  // also max_step_wait.
  scheduler::WaitLimits wait_limits() const { return {deadline_, waiter_, start_time_ + core().options.limits.max_step_wait}; }
  // Bounds of a wait of the thread that runs the call, also where a waiter waits for the call.
  scheduler::WaitLimits thread_limits() { return {deadline_, &thread_}; }
  // True once the client has cancelled, gone away, or its deadline has passed. From any thread.
  bool Cancelled();
  // kDeadlineExceeded or kCancelled, for a call that ended because of Cancelled(). `outcome` ends the message: the result of its
  // work, if that is known.
  absl::Status CancelledError(absl::string_view outcome = "") const;

  // Logs, counts and maps. Once, at the end, from which Drain() no longer waits for the call. While the engine's device is lost any
  // failed call is answered ServerCore::lost(), and by then the server has turned to NOT_SERVING.
  grpc::Status Finish(absl::Status status);

 private:
  static inline thread_local const RpcScope* current_ = nullptr;

  const Entrance entrance_;
  grpc::ServerContextBase& context_;
  const observability::RpcMethod method_;
  Caller caller_;
  const absl::Time start_time_;
  const absl::Time deadline_;
  std::string request_id_;
  std::optional<observability::TraceContext> trace_context_;
  std::string span_id_;  // this call's, if it belongs to a trace
  std::shared_ptr<observability::CallTrace> trace_;
  std::string head_;
  scheduler::ThreadWaiter thread_;
  scheduler::Waiter* const waiter_;
  ServerCore::Admission admission_;  // until Finish()
  heads::SessionRegistry::Use session_;
  std::vector<heads::HeadUse> heads_;
  absl::Mutex cancelled_mutex_;
  bool cancelled_ ABSL_GUARDED_BY(cancelled_mutex_) = false;
};

// Runs `body(scope)`, which returns absl::Status, as the RPC `method`, if its caller may. An exception ends the process: gRPC would
// answer it and continue with a half-done state.
template <typename Body>
grpc::Status RunRpc(const Entrance& entrance, grpc::ServerContextBase& context, observability::RpcMethod method,
                    Body&& body) noexcept {
  RpcScope scope(entrance, context, method);
  const RpcScope::OnThread on_thread(scope);
  if (absl::Status status = scope.Begin(); !status.ok()) return scope.Finish(std::move(status));
  return scope.Finish(body(scope));
}

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CALL_RPC_SCOPE_H_
