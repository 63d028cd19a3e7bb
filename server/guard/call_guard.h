// Every call is counted for the backlog (call_backlog.h) twice, at arrival and at its start, and checked before its handler.
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

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "server/guard/call_backlog.h"

namespace headwater::guard {

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
