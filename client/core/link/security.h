// The security of connections, in one place: TLS, and the metadata that every call carries, such as the token.
#ifndef HEADWATER_CLIENT_CORE_LINK_SECURITY_H_
#define HEADWATER_CLIENT_CORE_LINK_SECURITY_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_interceptor.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "headwater/client/options.h"

namespace headwater::client::internal {

// Checks the options about TLS, the token and the trace against each other and against `target`, and fills in
// TlsOptions::server_name. INVALID_ARGUMENT / INVALID_FIELD; never quotes the token.
absl::Status PrepareSecurity(const std::string& target, ClientOptions* options);

// Why a TLS handshake with `target` fails, as OpenSSL says it of one of its own: gRPC keeps the reason to itself. Empty if it does
// not fail. Takes a second at most.
std::string TlsFailureOf(const std::string& target, const TlsOptions& tls);

// Channels with the same files share one, which reads them again when they change.
std::shared_ptr<grpc::ChannelCredentials> MakeCredentials(const ClientOptions& options);
// Adds the channel arguments of TLS; nothing without TLS.
void AddTlsArguments(const ClientOptions& options, grpc::ChannelArguments* arguments);
// Add token and trace to every call; none without them.
std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> MakeInterceptors(const ClientOptions& options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_SECURITY_H_
