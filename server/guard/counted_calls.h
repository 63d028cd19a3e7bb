// Counts each call for the backlog (call_backlog.h) twice: when gRPC has read its metadata, before it has a handler and even if the
// client has reset it since, and when gRPC gets to it. The first moment is that of the credentials' metadata processor, the second
// that of an interceptor.
//
// Holds hostile_resets_latency_ratio and hostile_memory_growth of docs/benchmarks/trust.md.
#ifndef HEADWATER_SERVER_GUARD_COUNTED_CALLS_H_
#define HEADWATER_SERVER_GUARD_COUNTED_CALLS_H_

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/server_interceptor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "server/guard/call_backlog.h"

namespace headwater::guard {

// Takes over `credentials`. Every connection gets a number of the backlog's. With `is_counted`, a call that the backlog does not
// take is RESOURCE_EXHAUSTED.
std::shared_ptr<grpc::ServerCredentials> CountCalls(grpc_server_credentials* credentials, std::shared_ptr<CallBacklog> backlog,
                                                    bool is_counted = true);

// The number of the call's connection; nullopt for a call that came with other credentials, and for none (null).
std::optional<int64_t> ConnectionOf(grpc_call* call);

// Tells the backlog that gRPC has got to a call, before the call has its handler. A call that gRPC refuses for want of a thread
// never has one, and would be taken for one that waits forever. The backlog must outlive the server that the factory is given to.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CountArrivals(CallBacklog& backlog);

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_COUNTED_CALLS_H_
