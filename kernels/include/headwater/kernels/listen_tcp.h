// Listening sockets of TCP, as every listener of Headwater makes them.
#ifndef HEADWATER_KERNELS_LISTEN_TCP_H_
#define HEADWATER_KERNELS_LISTEN_TCP_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace headwater {

struct TcpListeners {
  std::vector<int> sockets;  // at least one; they listen, do not block, and are closed by exec; the caller's to close
  int port = 0;              // that of all of them
};

// Listens at `host`, a name or an IP address, and at `port`; 0: one that the system picks. "0.0.0.0" and "::" are all addresses of
// this machine, of IPv4 and IPv6 alike. A name gets a socket for each of its addresses that can be listened on. IPv6 addresses may
// stand in brackets.
//
// NotFound: the system does not know the name. Unavailable: no address can be listened on. The message has the reason alone.
absl::StatusOr<TcpListeners> ListenTcp(const std::string& host, int port);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_LISTEN_TCP_H_
