// The addresses that a client connects to: host:port, with or without one of gRPC's schemes, and Unix sockets.
#ifndef HEADWATER_CLIENT_CORE_LINK_TARGET_H_
#define HEADWATER_CLIENT_CORE_LINK_TARGET_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace headwater::client::internal {

// INVALID_ARGUMENT / INVALID_FIELD unless a target has one of the forms of Client::Connect().
absl::Status CheckTarget(const std::string& target);
bool IsUnix(absl::string_view target);
// `target` as gRPC parses it: in a Unix socket's path `%`, blanks, `?` and `#` stand for themselves.
std::string ToGrpcTarget(const std::string& target);
// The host of one that is no Unix socket.
std::string HostOf(absl::string_view target);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_TARGET_H_
