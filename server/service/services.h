// The gRPC services of headwater.v1, with the handlers of all their calls.
#ifndef HEADWATER_SERVER_SERVICE_SERVICES_H_
#define HEADWATER_SERVER_SERVICE_SERVICES_H_

#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <optional>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "server/scheduler/waiting.h"
#include "server/service/call/rpc_scope.h"

namespace headwater::service {

// The entrance's core must outlive the services.
std::unique_ptr<grpc::Service> MakeLossService(const Entrance& entrance);
std::unique_ptr<grpc::Service> MakeHeadService(const Entrance& entrance);
std::unique_ptr<grpc::Service> MakeSessionService(const Entrance& entrance);
std::unique_ptr<grpc::Service> MakeGroupService(const Entrance& entrance);

// A unary call of gRPC's callback API that may wait, and holds no thread while it does.
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

// In the class of a service with a member `entrance_`: gRPC's handler of a call. It runs the function `Method(scope, request,
// response)` of this namespace, which returns absl::Status. One of both may be a stream; the first is passed as a reference.
//
// The call holds a thread of gRPC's until it ends.
#define HEADWATER_CALL(Method, Request, Response)                                                    \
  grpc::Status Method(grpc::ServerContext* context, Request* request, Response* response) override { \
    return RunRpc(entrance_, *context, observability::RpcMethod::k##Method,                          \
                  [=](RpcScope& scope) { return service::Method(scope, *request, response); });      \
  }
// The call holds no thread while it waits (UnaryCall).
#define HEADWATER_WAITING_CALL(Method, Request, Response)                                                                       \
  grpc::ServerUnaryReactor* Method(grpc::CallbackServerContext* context, const Request* request, Response* response) override { \
    return UnaryCall::Start(entrance_, context, observability::RpcMethod::k##Method,                                            \
                            [=](RpcScope& scope) { return service::Method(scope, *request, response); });                       \
  }

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_SERVICES_H_
