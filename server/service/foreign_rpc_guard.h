// ForeignRpcGuard: the access table for services that gRPC brings along (health, reflection), whose handlers are not ours. Calls of
// our own services pass RpcScope::Begin() instead, which can say more of why one is refused. Also bounds the watches of the
// health, for each group of ports (Limits::max_health_watches).
#ifndef HEADWATER_SERVER_SERVICE_FOREIGN_RPC_GUARD_H_
#define HEADWATER_SERVER_SERVICE_FOREIGN_RPC_GUARD_H_

#include <grpcpp/support/server_interceptor.h>

#include <atomic>
#include <cstdint>
#include <memory>

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
  const std::shared_ptr<std::atomic<int64_t>> watches_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_FOREIGN_RPC_GUARD_H_
