// The way to a server.
#ifndef HEADWATER_CLIENT_CORE_LINK_CONNECT_H_
#define HEADWATER_CLIENT_CORE_LINK_CONNECT_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "headwater/client/options.h"

namespace headwater::client::internal {

// Checks target and options, reads what the options name, and waits until the server is reached.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& target, ClientOptions* options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_CONNECT_H_
