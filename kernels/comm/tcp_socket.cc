#include "kernels/comm/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "headwater/kernels/error.h"
#include "headwater/kernels/listen_tcp.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::comm {
namespace {

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// The time for one of several addresses of a name before the next: filtered packets get no answer at all. Allows one lost SYN.
constexpr std::chrono::seconds kOneOfSeveral(2);

// An IPv6 address without its brackets.
std::string WithoutBrackets(const std::string& host) {
  const bool has_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return has_brackets ? host.substr(1, host.size() - 2) : host;
}

// An empty host: the loopback addresses of this machine.
absl::StatusOr<AddressList> Resolve(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : WithoutBrackets(host).c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    return MakeError(ErrorReason::kEngineFailed, "the address " + host + ":" + port + " cannot be used: " + gai_strerror(error));
  }
  return AddressList(found, freeaddrinfo);
}

// Waits until the socket is ready for `events`.
absl::Status AwaitReady(int fd, short events, const Patience& patience) {
  while (true) {
    pollfd waiting = {fd, events, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(kLook.count()));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return SocketError("poll", errno);
    HEADWATER_RETURN_IF_ERROR(patience.Check());
  }
}

// move(at): sends or receives bytes from position `at` on, and returns their number.
template <typename Move>
absl::Status MoveAll(int fd, short event, size_t bytes, const Move& move, const Patience& patience) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t moved = move(at);
    if (moved > 0) {
      at += static_cast<size_t>(moved);
    } else if (moved == 0) {
      return SocketError("the connection has ended", ECONNRESET);
    } else if (errno == EAGAIN) {
      HEADWATER_RETURN_IF_ERROR(AwaitReady(fd, event, patience));
    } else if (errno != EINTR) {
      return SocketError(event == POLLIN ? "receive" : "send", errno);
    }
  }
  return absl::OkStatus();
}

void SendAtOnce(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

absl::StatusOr<Socket> TryConnect(const addrinfo& address, const Patience& patience) {
  Socket made(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made.open()) return SocketError("socket", errno);
  if (connect(made.fd(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return SocketError("connect", errno);
    HEADWATER_RETURN_IF_ERROR(AwaitReady(made.fd(), POLLOUT, patience));
    int error = 0;
    socklen_t size = sizeof(error);
    if (getsockopt(made.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) return SocketError("connect", error);
  }
  SendAtOnce(made.fd());
  return made;
}

}  // namespace

absl::Status Patience::Check() const {
  if (cancelled()) return absl::CancelledError("nobody wants it any longer");
  return Clock::now() < deadline ? absl::OkStatus() : absl::DeadlineExceededError("nothing came in time");
}

absl::Status SocketError(const std::string& what, int error_number) {
  return MakeError(ErrorReason::kEngineFailed, what + ": " + std::strerror(error_number));
}

absl::StatusOr<Socket> ListenAtAnyPort(const std::string& host, int32_t* port) {
  in6_addr ignored{};
  const std::string address = WithoutBrackets(host.substr(0, host.find('%')));  // an address of one link has its zone
  if (inet_pton(AF_INET, address.c_str(), &ignored) != 1 && inet_pton(AF_INET6, address.c_str(), &ignored) != 1) {
    return MakeError(ErrorReason::kEngineFailed, "expected an IP address to listen at, got \"" + host + "\"");
  }
  const absl::StatusOr<TcpListeners> listening = ListenTcp(host, 0);
  if (!listening.ok()) {
    return MakeError(ErrorReason::kEngineFailed, "cannot listen at " + host + ": " + std::string(listening.status().message()));
  }
  *port = listening->port;
  return Socket(listening->sockets.front());  // the only one of an IP address
}

absl::StatusOr<Socket> ConnectTcp(const std::string& address, const Patience& patience) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return MakeError(ErrorReason::kEngineFailed, "\"" + address + "\" is no host:port");
  HEADWATER_ASSIGN_OR_RETURN(const AddressList list, Resolve(address.substr(0, colon), address.substr(colon + 1)));
  const bool is_only = list->ai_next == nullptr;
  while (true) {
    absl::Status last;
    for (const addrinfo* one = list.get(); one != nullptr; one = one->ai_next) {
      const Clock::time_point turn_end = is_only ? patience.deadline : std::min(patience.deadline, Clock::now() + kOneOfSeveral);
      absl::StatusOr<Socket> made = TryConnect(*one, {turn_end, patience.cancelled});
      if (made.ok()) return made;
      last = made.status();
    }
    std::this_thread::sleep_for(kLook);
    const absl::Status status = patience.Check();
    if (absl::IsDeadlineExceeded(status)) {
      return absl::DeadlineExceededError(address + " cannot be reached: " + std::string(last.message()));
    }
    if (!status.ok()) return status;
  }
}

absl::StatusOr<Socket> AcceptTcp(const Socket& listener) {
  while (true) {
    Socket made(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (made.open()) {
      SendAtOnce(made.fd());
      return made;
    }
    if (errno == EAGAIN) return Socket();
    if (errno != EINTR && errno != ECONNABORTED) return SocketError("accept", errno);
  }
}

absl::Status SendAll(const Socket& socket, const void* data, size_t bytes, const Patience& patience) {
  const auto move = [&](size_t at) { return send(socket.fd(), static_cast<const char*>(data) + at, bytes - at, MSG_NOSIGNAL); };
  return MoveAll(socket.fd(), POLLOUT, bytes, move, patience);
}

absl::Status ReceiveAll(const Socket& socket, void* data, size_t bytes, const Patience& patience) {
  const auto move = [&](size_t at) { return recv(socket.fd(), static_cast<char*>(data) + at, bytes - at, 0); };
  return MoveAll(socket.fd(), POLLIN, bytes, move, patience);
}

}  // namespace headwater::comm
