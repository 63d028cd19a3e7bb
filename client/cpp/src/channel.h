// How this client makes gRPC channels.
#ifndef HEADWATER_CLIENT_SRC_CHANNEL_H_
#define HEADWATER_CLIENT_SRC_CHANNEL_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

#include "headwater/client/client.h"

namespace headwater::client::internal {

using Deadline = std::chrono::system_clock::time_point;

// A channel with a socket of its own, without gRPC's retries, hedging, service configs and proxies. Connects when it is used.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target, const ClientOptions& options);

// What channels that carry rows are made with.
grpc::ChannelArguments DataChannelArguments(const ClientOptions& options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_CHANNEL_H_
