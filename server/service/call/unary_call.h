// UnaryCall: a unary call of gRPC's callback API that may wait, and holds no thread while it does.
#ifndef HEADWATER_SERVER_SERVICE_CALL_UNARY_CALL_H_
#define HEADWATER_SERVER_SERVICE_CALL_UNARY_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <optional>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "server/scheduler/waiting.h"
#include "server/service/call/rpc_scope.h"

namespace headwater::service {

class UnaryCall final : public grpc::ServerUnaryReactor, private scheduler::Waiter {
 public:
  // The work of a call, as RunRpc()'s. A body that must wait with RpcScope::wait_limits() returns the status of Wait(), and is run
  // again from its beginning later. Its own state and the scope's stay until then.
  using Body = absl::AnyInvocable<absl::Status(RpcScope&)>;

  // Runs `body` on a thread of the core's. The reactor for gRPC.
  static grpc::ServerUnaryReactor* Start(const Entrance& entrance, grpc::CallbackServerContext* context,
                                         observability::RpcMethod method, Body body);

 private:
  UnaryCall(const Entrance& entrance, grpc::CallbackServerContext& context, observability::RpcMethod method, Body body);

  void Resume() override {
    threads_.Post([this] { Try(); });
  }
  // The body, until it ends or is parked. An exception ends the process.
  void Try() noexcept;
  void OnCancel() noexcept override { Cancel(); }
  void OnDone() noexcept override { delete this; }

  CallThreads& threads_;
  bool begun_ = false;
  std::optional<RpcScope> scope_;  // until the call has been answered, like the body
  Body body_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CALL_UNARY_CALL_H_
