// CallGuard: checks every call before its handler. It counts the call for the backlog, and guards the access to gRPC's built-in
// services (health, reflection), whose handlers are not ours. Our own services use service::RpcScope::Begin() instead, which
// reports more. Bounds the health watches of each group of ports (Limits::max_health_watches): a watch never ends by itself, and
// needs no token.
#ifndef HEADWATER_SERVER_GUARD_CALL_GUARD_H_
#define HEADWATER_SERVER_GUARD_CALL_GUARD_H_

#include <grpcpp/support/server_interceptor.h>
#include <grpcpp/support/string_ref.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "server/guard/call_backlog.h"

namespace headwater::guard {

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
