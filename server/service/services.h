// The gRPC services of headwater.v1, with the handlers of all their calls.
#ifndef HEADWATER_SERVER_SERVICE_SERVICES_H_
#define HEADWATER_SERVER_SERVICE_SERVICES_H_

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/service/call/rpc_scope.h"
#include "server/service/call/unary_call.h"

namespace headwater::service {

// The entrance's core must outlive the services.
std::unique_ptr<grpc::Service> MakeLossService(const Entrance& entrance);
std::unique_ptr<grpc::Service> MakeHeadService(const Entrance& entrance);
std::unique_ptr<grpc::Service> MakeSessionService(const Entrance& entrance);
std::unique_ptr<grpc::Service> MakeGroupService(const Entrance& entrance);

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
