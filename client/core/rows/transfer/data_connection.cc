#include "client/core/rows/transfer/data_connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/core/link/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

// How often a connection that is being made looks whether its caller still wants it.
constexpr int kPollMs = 20;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

// gRPC escapes the brackets of IPv6 addresses.
std::string Unescape(absl::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    int value = 0;
    if (text[i] == '%' && i + 2 < text.size() && absl::SimpleHexAtoi(text.substr(i + 1, 2), &value)) {
      result.push_back(static_cast<char>(value));
      i += 2;
    } else {
      result.push_back(text[i]);
    }
  }
  return result;
}

std::optional<SocketAddress> UnixAddress(const std::string& path, bool abstract) {
  SocketAddress address;
  sockaddr_un unix_address{};
  unix_address.sun_family = AF_UNIX;
  const size_t offset = abstract ? 1 : 0;  // an abstract name stands behind a zero byte, and has none at its end
  if (path.empty() || path.size() + 1 > sizeof(unix_address.sun_path)) return std::nullopt;
  std::memcpy(unix_address.sun_path + offset, path.data(), path.size());
  std::memcpy(&address.storage, &unix_address, sizeof(unix_address));
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  return address;
}

std::optional<SocketAddress> ParsePeer(absl::string_view peer) {
  if (absl::ConsumePrefix(&peer, "unix-abstract:")) return UnixAddress(Unescape(peer), /*abstract=*/true);
  if (absl::ConsumePrefix(&peer, "unix:")) {
    if (absl::StartsWith(peer, "//")) peer.remove_prefix(2);
    return UnixAddress(Unescape(peer), /*abstract=*/false);
  }
  if (!absl::ConsumePrefix(&peer, "ipv4:") && !absl::ConsumePrefix(&peer, "ipv6:")) return std::nullopt;
  std::string host = Unescape(peer);
  const size_t colon = host.rfind(':');
  if (colon == std::string::npos) return std::nullopt;
  const std::string port = host.substr(colon + 1);
  host.resize(colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return std::nullopt;
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

absl::Status CannotConnect(const std::string& peer, int error) {
  return absl::UnavailableError(absl::StrCat("the connection to ", peer, " failed: ", std::strerror(error)));
}

// A connected socket without delays, which does not block.
absl::StatusOr<int> Connect(const std::string& peer, const SocketAddress& address, Deadline deadline,
                            const std::function<bool()>& cancelled) {
  const int socket_fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_fd < 0) return CannotConnect(peer, errno);
  const auto fail = [socket_fd](absl::Status status) {
    close(socket_fd);
    return status;
  };
  if (address.storage.ss_family != AF_UNIX) {
    const int on = 1;
    setsockopt(socket_fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  int result = connect(socket_fd, reinterpret_cast<const sockaddr*>(&address.storage), address.length);
  // EAGAIN: a Unix socket whose queue of connections is full; it must be asked again.
  while (result != 0) {
    if (errno != EINPROGRESS && errno != EAGAIN && errno != EINTR) return fail(CannotConnect(peer, errno));
    if (cancelled()) {
      return fail(MakeLocalError(v1::ERROR_REASON_CANCELLED, absl::StatusCode::kCancelled, "the call was cancelled"));
    }
    if (std::chrono::system_clock::now() >= deadline) {
      return fail(MakeLocalError(v1::ERROR_REASON_DEADLINE_EXCEEDED, absl::StatusCode::kDeadlineExceeded,
                                 absl::StrCat("the deadline passed before ", peer, " could be connected to")));
    }
    if (errno == EAGAIN) {
      poll(nullptr, 0, 1);
      result = connect(socket_fd, reinterpret_cast<const sockaddr*>(&address.storage), address.length);
      continue;
    }
    pollfd ready{socket_fd, POLLOUT, 0};
    if (poll(&ready, 1, kPollMs) > 0) {
      int error = 0;
      socklen_t size = sizeof(error);
      getsockopt(socket_fd, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error != 0) return fail(CannotConnect(peer, error));
      result = 0;
    } else {
      errno = EINPROGRESS;
    }
  }
  return socket_fd;
}

// The authority that the server sees: what the address names, without a scheme.
std::string AuthorityOf(const std::string& peer) {
  if (!absl::StartsWith(peer, "ipv")) return "localhost";
  return Unescape(peer.substr(sizeof("ipv4:") - 1));
}

}  // namespace

absl::StatusOr<std::shared_ptr<DataConnection>> DataConnection::Open(const std::string& peer, const ClientOptions& options,
                                                                     Deadline deadline, const std::function<bool()>& cancelled) {
  const std::optional<SocketAddress> address = ParsePeer(peer);
  // gRPC speaks TLS only on sockets that it has made itself.
  if (!address.has_value() || options.tls.has_value()) {
    return std::shared_ptr<DataConnection>(new DataConnection(peer, MakeDataChannel(peer, options), -1));
  }
  HEADWATER_ASSIGN_OR_RETURN(const int socket_fd, Connect(peer, *address, deadline, cancelled));
  const int second_fd = fcntl(socket_fd, F_DUPFD_CLOEXEC, 0);
  if (second_fd < 0) {
    const int error = errno;
    close(socket_fd);
    return CannotConnect(peer, error);
  }
  return std::shared_ptr<DataConnection>(
      new DataConnection(peer, MakeDataChannel(peer, AuthorityOf(peer), socket_fd, options), second_fd));
}

DataConnection::~DataConnection() {
  if (socket_ >= 0) close(socket_);
}

bool DataConnection::usable() const {
  if (retired_) return false;
  if (socket_ < 0) return true;
  pollfd state{socket_, POLLRDHUP, 0};
  return poll(&state, 1, 0) == 0;
}

void DataConnection::Break() {
  retired_ = true;
  if (socket_ >= 0) shutdown(socket_, SHUT_RDWR);
}

}  // namespace headwater::client::internal
