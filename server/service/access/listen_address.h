// The addresses that a server listens on, and the access to Unix sockets.
#ifndef HEADWATER_SERVER_SERVICE_ACCESS_LISTEN_ADDRESS_H_
#define HEADWATER_SERVER_SERVICE_ACCESS_LISTEN_ADDRESS_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace headwater::service {

struct ListenAddress {
  std::string path;  // of unix:PATH and unix://PATH; empty: host:port
  std::string host;
  int port = 0;

  bool is_unix() const { return !path.empty(); }
  // Whether only processes of this host can reach it.
  bool is_local() const;
};
// InvalidArgument unless it is host:port or unix:PATH.
absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& address);

// The owner of a Unix socket, and its permissions. Absent: as the process makes it.
struct SocketAccess {
  std::optional<uid_t> user;
  std::optional<gid_t> group;
  mode_t mode = 0600;
};
// `owner` is USER, USER:GROUP or :GROUP, by name or number; or empty. InvalidArgument for an unknown one, and for a mode that is
// not from 0 to 0777.
absl::StatusOr<SocketAccess> MakeSocketAccess(const std::string& owner, int mode);

// Gives a Unix socket its owner and mode. Unavailable if that fails.
absl::Status SetSocketAccess(const std::string& path, const SocketAccess& access);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ACCESS_LISTEN_ADDRESS_H_
