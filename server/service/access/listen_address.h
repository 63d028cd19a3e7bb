// The addresses that a server listens on, and the access to Unix sockets.
#ifndef HEADWATER_SERVER_SERVICE_ACCESS_LISTEN_ADDRESS_H_
#define HEADWATER_SERVER_SERVICE_ACCESS_LISTEN_ADDRESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace headwater::service {

// InvalidArgument unless it is host:port or unix:PATH.
absl::Status CheckListenAddress(const std::string& address);
// unix:PATH.
bool IsUnixAddress(const std::string& address);
// PATH of unix:PATH and unix://PATH.
std::string SocketPath(const std::string& address);
// Host and port of an address that CheckListenAddress() has accepted.
std::pair<std::string, int> HostAndPort(const std::string& address);
// Whether only processes of this host can reach it.
bool IsLocalAddress(const std::string& address);

// The owner of a Unix socket, and its permissions. Absent: as the process makes it.
struct SocketAccess {
  std::optional<uid_t> user;
  std::optional<gid_t> group;
  mode_t mode = 0600;
};
// `owner` is USER, USER:GROUP or :GROUP, by name or number; or empty. InvalidArgument for an unknown one, and for a mode that is
// not from 0 to 0777.
absl::StatusOr<SocketAccess> MakeSocketAccess(const std::string& owner, int mode);

// Gives the socket of a Unix address its owner and mode. Unavailable if that fails.
absl::Status SetSocketAccess(const std::string& address, const SocketAccess& access);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ACCESS_LISTEN_ADDRESS_H_
