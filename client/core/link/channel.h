// How this client makes gRPC channels, and comes to a server by them.
#ifndef HEADWATER_CLIENT_CORE_LINK_CHANNEL_H_
#define HEADWATER_CLIENT_CORE_LINK_CHANNEL_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "headwater/client/future.h"
#include "headwater/client/options.h"

namespace headwater::client::internal {

using Deadline = std::chrono::system_clock::time_point;

// `timeout` from now, whatever its unit: the longest ones do not become the past.
template <typename Timeout>
Deadline DeadlineIn(Timeout timeout) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<Deadline::duration>(std::min<Timeout>(timeout, kLongestTimeout));
}

// All of them with the options' TLS and token; PrepareSecurity() has checked them.

// A channel with a socket of its own, without gRPC's retries, hedging, service configs and proxies. Connects when it is used.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target, const ClientOptions& options);

// One that carries rows: to an address, or, without TLS, over a connected socket, which it takes.
std::shared_ptr<grpc::Channel> MakeDataChannel(const std::string& peer, const ClientOptions& options);
std::shared_ptr<grpc::Channel> MakeDataChannel(const std::string& peer, const std::string& authority, int socket_fd,
                                               const ClientOptions& options);

// A channel to a server. It checks target and options, reads the files that the options name, and waits until the server is
// reached.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& target, ClientOptions* options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_CHANNEL_H_
