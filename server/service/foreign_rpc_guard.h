// ForeignRpcGuard: the access table for services that gRPC brings along (health, reflection), whose handlers are not ours. Calls of
// our own services pass RpcScope::Authorize() instead, which can say more of why one is refused.
#ifndef HEADWATER_SERVER_SERVICE_FOREIGN_RPC_GUARD_H_
#define HEADWATER_SERVER_SERVICE_FOREIGN_RPC_GUARD_H_

#include <grpcpp/support/server_interceptor.h>

#include "server/service/rpc_scope.h"

namespace headwater::service {

class ForeignRpcGuard final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // The core must outlive the server that this is given to.
  explicit ForeignRpcGuard(const Entrance& entrance) : entrance_(entrance) {}
  // Null, which costs a call nothing, for our own services.
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override;

 private:
  const Entrance entrance_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_FOREIGN_RPC_GUARD_H_
