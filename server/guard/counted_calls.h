// Counts each call for the backlog (call_backlog.h) twice: at arrival and at its start. A call arrives when gRPC has read its
// metadata, in the credentials' metadata processor. It has no handler yet, and the client may have reset it. An interceptor counts
// the start. Holds hostile_resets_latency_ratio and hostile_memory_growth of docs/benchmarks/trust.md.
#ifndef HEADWATER_SERVER_GUARD_COUNTED_CALLS_H_
#define HEADWATER_SERVER_GUARD_COUNTED_CALLS_H_

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_context.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "server/guard/call_backlog.h"

namespace headwater::guard {

// Takes over `credentials`. Each connection gets a number from the backlog. With `is_counted`, a call that the backlog refuses
// fails with RESOURCE_EXHAUSTED.
std::shared_ptr<grpc::ServerCredentials> CountCalls(grpc_server_credentials* credentials, std::shared_ptr<CallBacklog> backlog,
                                                    bool is_counted = true);

// The number of the call's connection; nullopt for null, and for a call with other credentials.
std::optional<int64_t> ConnectionOf(grpc_call* call);

// Reports to the backlog that gRPC starts a call, before the call has its handler. A call that gRPC refuses for lack of a thread
// never has a handler, and would count as waiting forever.
void CountStart(CallBacklog& backlog, grpc::ServerContextBase& context);

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_COUNTED_CALLS_H_
