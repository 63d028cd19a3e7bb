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
#include "client/core/link/socket.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

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

// The authority that the server sees: the name in the address, without a scheme.
std::string AuthorityOf(const std::string& peer) {
  if (!absl::StartsWith(peer, "ipv")) return "localhost";
  return Unescape(peer.substr(sizeof("ipv4:") - 1));
}

}  // namespace

absl::StatusOr<std::shared_ptr<DataConnection>> DataConnection::Open(const std::string& peer, const ClientOptions& options,
                                                                     const Wait& wait) {
  const std::optional<SocketAddress> address = ParsePeer(peer);
  // gRPC speaks TLS only on sockets that it has made itself.
  if (!address.has_value() || options.tls.has_value()) {
    return std::shared_ptr<DataConnection>(new DataConnection(peer, MakeDataChannel(peer, options), -1));
  }
  Socket socket(address->storage.ss_family, SOCK_STREAM, wait);
  const int on = 1;
  if (address->storage.ss_family != AF_UNIX) setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  Descriptor second(-1);
  if (socket.Connect(reinterpret_cast<const sockaddr*>(&address->storage), address->length) == 0) {
    second.fd = fcntl(socket.fd(), F_DUPFD_CLOEXEC, 0);
  }
  if (second.fd < 0) {
    const int error = errno;
    HEADWATER_RETURN_IF_ERROR(wait.Check());
    return absl::UnavailableError(absl::StrCat("the connection to ", peer, " failed: ", std::strerror(error)));
  }
  return std::shared_ptr<DataConnection>(
      new DataConnection(peer, MakeDataChannel(peer, AuthorityOf(peer), socket.Release(), options), second.Release()));
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
