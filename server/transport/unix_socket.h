// Unix sockets that an earlier process may have left.
#ifndef HEADWATER_SERVER_TRANSPORT_UNIX_SOCKET_H_
#define HEADWATER_SERVER_TRANSPORT_UNIX_SOCKET_H_

#include <sys/un.h>

namespace headwater::transport {

// Whether a process may listen at `address` with sockets of `type` (SOCK_STREAM, SOCK_SEQPACKET): false only if refused.
bool SomebodyListens(const sockaddr_un& address, int type);

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_UNIX_SOCKET_H_
