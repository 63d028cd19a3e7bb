// Credentials of which every connection has a number, by which its calls are told from those of others, and of which every call may
// be counted as soon as gRPC has read its metadata: before it has a handler, and even if the client has reset it since. gRPC asks
// the credentials' processor of metadata at that moment, and nobody else.
#ifndef HEADWATER_SERVER_SERVICE_COUNTED_CREDENTIALS_H_
#define HEADWATER_SERVER_SERVICE_COUNTED_CREDENTIALS_H_

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "server/transport/call_backlog.h"

namespace headwater::service {

// Takes over `credentials`. Calls that the backlog does not take are RESOURCE_EXHAUSTED.
std::shared_ptr<grpc::ServerCredentials> CountCalls(grpc_server_credentials* credentials,
                                                    std::shared_ptr<transport::CallBacklog> backlog);

// Takes over `credentials`. Calls are not counted; the numbers are those of the backlog, too, so that no two connections have one.
std::shared_ptr<grpc::ServerCredentials> NumberConnections(grpc_server_credentials* credentials,
                                                           std::shared_ptr<transport::CallBacklog> backlog);

// The number of the call's connection; nullopt for a call that came with other credentials, and for none (null).
std::optional<int64_t> ConnectionOf(grpc_call* call);

// gRPC has got to the call, once for each. Without effect for calls that are not counted.
void OnCallTaken(transport::CallBacklog& backlog, grpc_call* call, const std::string& peer);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_COUNTED_CREDENTIALS_H_
