#include "server/service/foreign_rpc_guard.h"

#include <grpc/grpc.h>
#include <grpcpp/server_context.h>

#include <string>

#include "absl/strings/match.h"
#include "server/observability/logging.h"
#include "server/service/access_table.h"

namespace headwater::service {
namespace {

using grpc::experimental::InterceptionHookPoints;

class Guard final : public grpc::experimental::Interceptor {
 public:
  Guard(const Entrance& entrance, grpc::experimental::ServerRpcInfo& info) : entrance_(entrance), info_(info) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) Check(*methods);
    methods->Proceed();
  }

 private:
  void Check(grpc::experimental::InterceptorBatchMethods& methods) {
    const AccessRow* const row = FindAccessRow(info_.method());
    const auto caller = entrance_.core.access->Authorize(row, entrance_.role, AuthorizationOf(*methods.GetRecvInitialMetadata()));
    if (caller.ok()) return;
    // Ends the call with this status before its handler has begun, which then finds nothing to read and nobody to answer.
    grpc_call_cancel_with_status(info_.server_context()->c_call(), static_cast<grpc_status_code>(caller.status().code()),
                                 std::string(caller.status().message()).c_str(), nullptr);
    observability::Log(observability::LogLevel::kWarning, "rpc",
                       {{"method", info_.method()},
                        {"code", observability::CanonicalCodeName(caller.status().code())},
                        {"message", std::string(caller.status().message())}});
  }

  const Entrance& entrance_;
  grpc::experimental::ServerRpcInfo& info_;
};

}  // namespace

grpc::experimental::Interceptor* ForeignRpcGuard::CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) {
  if (absl::StartsWith(info->method(), "/headwater.v1.")) return nullptr;
  return new Guard(entrance_, *info);
}

}  // namespace headwater::service
