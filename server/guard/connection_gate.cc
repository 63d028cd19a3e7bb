#include "server/guard/connection_gate.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/listen_tcp.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::guard {
namespace {

constexpr int kAcceptsAtOnce = 64;  // before the others' turn
// Descriptors that the process opens beside connections: files, other sockets, the engine's.
constexpr int64_t kOtherDescriptors = 256;
// Data that a client does not acknowledge for so long ends the connection, as the pings of an idle one do.
constexpr unsigned kTcpUserTimeoutMs = 20000;

constexpr double kCancelsAtOnce = 10;  // seconds' worth of them
// Cancels that each connection may make, regardless of others of its host.
constexpr int64_t kFreeCancels = 16;
constexpr size_t kMostHosts = 4096;
// A client that comes back as often as it is cut off costs the server most before its first call is started.
constexpr absl::Duration kHold = absl::Milliseconds(250);
constexpr absl::Duration kHoldsAfterCut = absl::Seconds(10);

constexpr uint64_t kStopKey = UINT64_MAX;
constexpr uint64_t kListenerKey = uint64_t{1} << 32;  // + its index; the key of a duplicate is its number

absl::Status Unavailable(const std::string& address, const char* what) {
  return absl::UnavailableError(absl::StrCat(address, ": ", what, ": ", std::strerror(errno)));
}

bool SetOption(int fd, int level, int name, int value) { return setsockopt(fd, level, name, &value, sizeof(value)) == 0; }

// The other side, as gRPC calls it; empty for what has no address.
std::string PeerOf(int fd) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return "";
  return PeerName(address);
}

// The host's part of a peer's name.
std::string HostName(const std::string& peer) { return peer.substr(0, peer.rfind(':')); }

}  // namespace

std::string PeerName(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> host{};
  if (address.ss_family == AF_INET) {
    const auto* four = reinterpret_cast<const sockaddr_in*>(&address);
    inet_ntop(AF_INET, &four->sin_addr, host.data(), host.size());
    return absl::StrCat("ipv4:", host.data(), ":", ntohs(four->sin_port));
  }
  if (address.ss_family != AF_INET6) return "";
  const auto* six = reinterpret_cast<const sockaddr_in6*>(&address);
  if (IN6_IS_ADDR_V4MAPPED(&six->sin6_addr)) {
    inet_ntop(AF_INET, six->sin6_addr.s6_addr + 12, host.data(), host.size());
    return absl::StrCat("ipv4:", host.data(), ":", ntohs(six->sin6_port));
  }
  inet_ntop(AF_INET6, &six->sin6_addr, host.data(), host.size());
  // An address of one link has its zone, which gRPC calls by its number.
  const std::string zone = six->sin6_scope_id == 0 ? "" : absl::StrCat("%25", six->sin6_scope_id);
  return absl::StrCat("ipv6:%5B", host.data(), zone, "%5D:", ntohs(six->sin6_port));
}

ConnectionGate::~ConnectionGate() {
  Stop();
  for (const auto& [duplicate, peer] : duplicates_) close(duplicate);
  for (const Listener& listener : listeners_) {
    struct stat file {};
    // Another server may have put its own there meanwhile.
    if (!listener.path.empty() && lstat(listener.path.c_str(), &file) == 0 && file.st_ino == listener.inode) {
      unlink(listener.path.c_str());
    }
  }
}

absl::StatusOr<int> ConnectionGate::ListenTcp(const std::string& host, int port, Take take) {
  absl::StatusOr<TcpListeners> listening = headwater::ListenTcp(host, port);
  if (!listening.ok()) {
    return absl::UnavailableError(absl::StrCat(host, ":", port, ": cannot listen: ", listening.status().message()));
  }
  for (const int fd : listening->sockets) listeners_.push_back({transport::FileDescriptor(fd), take, true, "", 0});
  return listening->port;
}

absl::Status ConnectionGate::ListenUnix(const std::string& path, Take take) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::UnavailableError(
        absl::StrCat("unix:", path, ": expected a path of at most ", sizeof(address.sun_path) - 1, " bytes, got ", path.size()));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  struct stat file {};
  if (lstat(path.c_str(), &file) == 0 && S_ISSOCK(file.st_mode)) {
    if (transport::SomebodyListens(address, SOCK_STREAM)) {
      return absl::UnavailableError(absl::StrCat("unix:", path, ": another server listens there"));
    }
    unlink(path.c_str());
  }
  transport::FileDescriptor socket_fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_fd.valid() || bind(socket_fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(socket_fd.get(), SOMAXCONN) != 0 || lstat(path.c_str(), &file) != 0) {
    return Unavailable("unix:" + path, "cannot listen");
  }
  listeners_.push_back({std::move(socket_fd), std::move(take), false, path, file.st_ino});
  return absl::OkStatus();
}

absl::Status ConnectionGate::Start() {
  epoll_ = transport::FileDescriptor(epoll_create1(EPOLL_CLOEXEC));
  stop_ = transport::FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  spare_ = transport::FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!epoll_.valid() || !stop_.valid() || !spare_.valid()) return Unavailable("the server", "cannot accept connections");
  const auto watch = [this](int fd, uint64_t key) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key;
    return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  };
  bool watched = watch(stop_.get(), kStopKey);
  for (size_t i = 0; i < listeners_.size(); ++i) watched = watched && watch(listeners_[i].socket.get(), kListenerKey + i);
  if (!watched) return Unavailable("the server", "cannot accept connections");
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void ConnectionGate::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    while (write(stop_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
    }
    thread_.join();
  }
  for (Listener& listener : listeners_) listener.socket.Close();
}

void ConnectionGate::Run() {
  std::array<epoll_event, 256> events{};
  while (true) {
    const int wait_ms = HandOver(observability::MonotonicNow());
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms);
    // Closed connections first: they make room.
    for (int i = 0; i < count; ++i) {
      const uint64_t key = events[static_cast<size_t>(i)].data.u64;
      if (key < kListenerKey && (events[static_cast<size_t>(i)].events & EPOLLHUP) != 0) Forget(static_cast<int>(key));
    }
    for (int i = 0; i < count; ++i) {
      const uint64_t key = events[static_cast<size_t>(i)].data.u64;
      if (key == kStopKey) {
        for (const Held& held : held_) {
          shutdown(held.fd, SHUT_RDWR);  // its duplicate stays open until the gate is destroyed
          close(held.fd);
        }
        return;
      }
      if (key >= kListenerKey) Accept(listeners_[static_cast<size_t>(key - kListenerKey)]);
    }
  }
}

void ConnectionGate::Accept(const Listener& listener) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    const int fd = accept4(listener.socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE) RefuseWithTheSpare(listener.socket.get());
      return;
    }
    if (!LetIn(listener, fd)) {
      refused_.fetch_add(1);  // before the client can notice
      close(fd);
    }
  }
}

bool ConnectionGate::LetIn(const Listener& listener, int fd) {
  if (connections_.load() >= max_connections_) return false;
  const int duplicate = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) return false;
  epoll_event event{};
  event.events = EPOLLET;  // EPOLLHUP is always reported: the owner shuts both directions down at the end
  event.data.u64 = static_cast<uint64_t>(duplicate);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, duplicate, &event) != 0) {
    close(duplicate);
    return false;
  }
  const std::string peer = listener.tcp ? PeerOf(fd) : "";
  const absl::Time now = observability::MonotonicNow();
  bool is_held = false;
  if (!peer.empty()) {
    absl::MutexLock lock(&peers_mutex_);
    peers_[peer] = {duplicate, 0};
    const auto host = hosts_.find(HostName(peer));
    is_held = host != hosts_.end() && now < host->second.last_cut + kHoldsAfterCut;
  }
  duplicates_.emplace(duplicate, peer);
  connections_.fetch_add(1);
  if (listener.tcp) {
    SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kTcpUserTimeoutMs);
  }
  if (is_held) held_.push_back({now + kHold, &listener, fd, duplicate});
  if (!is_held) listener.take(listener.socket.get(), fd);
  return true;
}

int ConnectionGate::HandOver(absl::Time now) {
  for (; !held_.empty() && held_.front().due <= now; held_.pop_front()) {
    held_.front().listener->take(held_.front().listener->socket.get(), held_.front().fd);
  }
  return held_.empty() ? -1 : static_cast<int>(absl::ToInt64Milliseconds(held_.front().due - now)) + 1;
}

void ConnectionGate::RefuseWithTheSpare(int listener_fd) {
  spare_.Close();
  if (const int fd = accept4(listener_fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); fd >= 0) {
    refused_.fetch_add(1);
    close(fd);
  }
  spare_ = transport::FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void ConnectionGate::Forget(int duplicate) {
  const auto found = duplicates_.find(duplicate);
  if (found == duplicates_.end()) return;
  {
    // The port may already be in use again: then the name belongs to another connection.
    absl::MutexLock lock(&peers_mutex_);
    const auto peer = peers_.find(found->second);
    if (peer != peers_.end() && peer->second.duplicate == duplicate) peers_.erase(peer);
  }
  duplicates_.erase(found);
  // Its client has reset it while it waited.
  const auto held = std::find_if(held_.begin(), held_.end(), [&](const Held& one) { return one.duplicate == duplicate; });
  if (held != held_.end()) {
    close(held->fd);
    held_.erase(held);
  }
  // Closing alone is not enough while the owner has the connection open. Its later events would be taken for the next connection
  // whose duplicate gets this number.
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, duplicate, nullptr);
  close(duplicate);
  connections_.fetch_sub(1);
}

ConnectionGate::Host& ConnectionGate::HostOf(const std::string& peer, absl::Time now) {
  const double most = kCancelsAtOnce * cancels_a_second_;
  if (hosts_.size() >= kMostHosts) hosts_.clear();  // forget rather than grow: active hosts are soon known again
  const auto [place, is_new] = hosts_.try_emplace(HostName(peer), Host{.cancels_left = most, .last_cancel = now});
  Host& host = place->second;
  const double gained = cancels_a_second_ * std::max(0.0, absl::ToDoubleSeconds(now - host.last_cancel));
  host.cancels_left = std::min(most, host.cancels_left + gained);
  host.last_cancel = now;
  return host;
}

void ConnectionGate::OnCancelled(const std::string& peer, absl::Time now) {
  absl::MutexLock lock(&peers_mutex_);
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  Host& host = HostOf(peer, now);
  const bool exhausted = host.cancels_left < 1;
  if (!exhausted) host.cancels_left -= 1;
  if (++found->second.cancels > kFreeCancels && exhausted) CutOff(found, host, now);
}

void ConnectionGate::Drop(const std::string& peer, absl::Time now) {
  absl::MutexLock lock(&peers_mutex_);
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  Host& host = HostOf(peer, now);
  host.cancels_left = 0;
  CutOff(found, host, now);
}

void ConnectionGate::CutOff(std::map<std::string, Peer>::iterator peer, Host& host, absl::Time now) {
  host.last_cut = now;
  const int fd = peer->second.duplicate;
  dropped_.fetch_add(1);  // before the client can notice
  shutdown(fd, SHUT_RDWR);
  // Unread data is discarded: megabytes that the owner would read before the end.
  while (recv(fd, nullptr, std::numeric_limits<int>::max(), MSG_TRUNC | MSG_DONTWAIT) > 0) {
  }
  peers_.erase(peer);
}

int64_t DescriptorsFor(int64_t connections) { return 2 * connections + kOtherDescriptors; }

int64_t MakeRoomForConnections(int64_t connections) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  const rlim_t wanted = static_cast<rlim_t>(DescriptorsFor(connections));
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = std::min(wanted, limit.rlim_max);
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
  }
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX));
}

}  // namespace headwater::guard
