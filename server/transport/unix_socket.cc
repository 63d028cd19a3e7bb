#include "server/transport/unix_socket.h"

#include <sys/socket.h>

#include <cerrno>

#include "server/transport/file_descriptor.h"

namespace headwater::transport {

bool SomebodyListens(const sockaddr_un& address, int type) {
  const FileDescriptor probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return true;
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 || errno != ECONNREFUSED;
}

}  // namespace headwater::transport
