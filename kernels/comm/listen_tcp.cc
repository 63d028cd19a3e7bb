#include "headwater/kernels/listen_tcp.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

namespace headwater {
namespace {

// A socket that listens at the address; IPv6's wildcard includes IPv4. -1, with errno, on failure.
int ListenAt(const sockaddr* address, socklen_t bytes) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return fd;
  const int on = 1;
  bool done = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0;
  if (done && address->sa_family == AF_INET6) {
    const int only = IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr) ? 0 : 1;
    done = setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only)) == 0;
  }
  if (done && bind(fd, address, bytes) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

in_port_t& PortOf(sockaddr* address) {
  return address->sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(address)->sin_port;
}

int BoundPort(int fd) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return 0;
  return ntohs(PortOf(reinterpret_cast<sockaddr*>(&address)));
}

absl::Status CannotListen(int error) { return absl::UnavailableError(std::strerror(error)); }

}  // namespace

absl::StatusOr<TcpListeners> ListenTcp(const std::string& host, int port) {
  const auto network_port = [](int number) { return htons(static_cast<uint16_t>(number)); };
  std::string name = host;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']') name = name.substr(1, name.size() - 2);
  if (name == "0.0.0.0" || name == "::") {
    sockaddr_in6 six{};
    six.sin6_family = AF_INET6;
    six.sin6_addr = in6addr_any;
    six.sin6_port = network_port(port);
    const int fd = ListenAt(reinterpret_cast<const sockaddr*>(&six), sizeof(six));
    if (fd >= 0) return TcpListeners{{fd}, BoundPort(fd)};
    if (errno == EADDRINUSE || errno == EACCES) return CannotListen(errno);
    name = "0.0.0.0";  // this machine has no IPv6
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(name.c_str(), nullptr, &hints, &found); error != 0) {
    return absl::NotFoundError(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  TcpListeners made;
  made.port = port;
  int first_error = 0;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    if (info->ai_family != AF_INET && info->ai_family != AF_INET6) continue;
    PortOf(info->ai_addr) = network_port(made.port);
    const int fd = ListenAt(info->ai_addr, info->ai_addrlen);
    if (fd < 0) {
      if (first_error == 0) first_error = errno;
      continue;
    }
    made.sockets.push_back(fd);
    made.port = BoundPort(fd);  // the same for the name's other addresses
  }
  if (made.sockets.empty()) return CannotListen(first_error);
  return made;
}

}  // namespace headwater
