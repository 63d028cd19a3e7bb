// Credentials of which every call is counted as soon as gRPC has read its metadata: before it has a handler, and even if the client
// has reset it since. gRPC asks the credentials' processor of metadata at that moment, and nobody else.
#ifndef HEADWATER_SERVER_SERVICE_COUNTED_CREDENTIALS_H_
#define HEADWATER_SERVER_SERVICE_COUNTED_CREDENTIALS_H_

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "server/transport/call_backlog.h"

namespace headwater::service {

// Takes over `credentials`. Calls that the backlog does not take are RESOURCE_EXHAUSTED.
std::shared_ptr<grpc::ServerCredentials> CountCalls(grpc_server_credentials* credentials,
                                                    std::shared_ptr<transport::CallBacklog> backlog);

// gRPC has got to the call, once for each. Without effect for calls that came with other credentials.
void OnCallTaken(transport::CallBacklog& backlog, grpc_call* call, const std::string& peer);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_COUNTED_CREDENTIALS_H_
