#include "server/transport/descriptor_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/observability/monotonic_clock.h"
#include "server/transport/region_registry.h"

namespace headwater::transport {
namespace {

using observability::MonotonicNow;

// How late a connection or a descriptor that is too old is closed.
constexpr absl::Duration kTick = absl::Milliseconds(100);
constexpr int kMaxDescriptors = 8;  // examined at most; the kernel closes further ones and reports that

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are copied as they are");

struct Packet {
  ssize_t bytes = -1;  // of recvmsg()
  bool truncated = false;
  std::array<uint8_t, kDescriptorRequestBytes> data{};
  std::vector<FileDescriptor> descriptors;
};

Packet Receive(int fd) {
  Packet packet;
  iovec part = {packet.data.data(), packet.data.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  do {
    packet.bytes = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (packet.bytes < 0 && errno == EINTR);
  if (packet.bytes < 0) return packet;
  packet.truncated = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      packet.descriptors.emplace_back(received);
    }
  }
  return packet;
}

absl::Status CheckPacket(const Packet& packet) {
  uint32_t version = 0;
  int64_t bytes = 0;
  std::memcpy(&version, packet.data.data() + 4, sizeof(version));
  std::memcpy(&bytes, packet.data.data() + 8, sizeof(bytes));
  if (packet.truncated || packet.bytes != static_cast<ssize_t>(kDescriptorRequestBytes) ||
      std::memcmp(packet.data.data(), kDescriptorMagic, sizeof(kDescriptorMagic)) != 0) {
    return MakeError(ErrorReason::kProtocolViolation, "expected a packet of 16 bytes that begins with HWMD");
  }
  if (version != kDescriptorProtocolVersion) {
    return MakeError(ErrorReason::kProtocolViolation, absl::StrCat("expected version 1 of the protocol, got ", version));
  }
  if (packet.descriptors.size() != 1) {
    return MakeError(ErrorReason::kProtocolViolation, absl::StrCat("expected one descriptor, got ", packet.descriptors.size()));
  }
  HEADWATER_ASSIGN_OR_RETURN(const int64_t size, CheckSealedMemory(packet.descriptors.front().get(), "descriptor"));
  if (size == bytes) return absl::OkStatus();
  return MakeError(ErrorReason::kInvalidField,
                   absl::StrCat("expected memory of the ", bytes, " bytes that were named, got ", size));
}

// The packet has no metadata: its sentence names the limit, too.
absl::Status TooManyWait(const char* whose, const char* limit, int64_t maximum, int64_t actual) {
  const std::string expected = absl::StrCat("at most ", maximum, " of ", whose, " that wait to be registered (", limit, ")");
  return MakeError(ErrorReason::kQuotaExceeded,
                   absl::StrCat("descriptor: expected ", expected, ", got ", actual, "; register them, or wait"),
                   {{"field", "descriptor"},
                    {"limit", limit},
                    {"maximum", absl::StrCat(maximum)},
                    {"expected", expected},
                    {"actual", absl::StrCat(actual)}});
}

// The buffer of a fresh socket has room for one packet; a closed connection needs none.
void Send(int fd, const void* data, size_t bytes) { static_cast<void>(send(fd, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL)); }

void Answer(int fd, const absl::Status& error) {
  std::string answer(kDescriptorMagic, sizeof(kDescriptorMagic));
  const uint32_t code = static_cast<uint32_t>(error.code());
  answer.append(reinterpret_cast<const char*>(&code), sizeof(code));
  answer.append(std::string(error.message()).substr(0, kDescriptorMaxErrorBytes));
  Send(fd, answer.data(), answer.size());
}

}  // namespace

DescriptorSocket::DescriptorSocket(const DescriptorSocketOptions& options, std::string path, FileDescriptor listener,
                                   FileDescriptor wake)
    : options_(options), path_(std::move(path)), listener_(std::move(listener)), wake_(std::move(wake)) {
  thread_ = std::thread([this] { Run(); });
}

DescriptorSocket::~DescriptorSocket() {
  const uint64_t one = 1;
  while (write(wake_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  thread_.join();
  unlink(path_.c_str());
}

absl::StatusOr<FileDescriptor> DescriptorSocket::Take(absl::string_view token) {
  absl::MutexLock lock(&mutex_);
  const auto found = waiting_.find(std::string(token));
  if (found != waiting_.end()) {
    Waiting taken = std::move(found->second);
    waiting_.erase(found);
    if (MonotonicNow() < taken.end) return std::move(taken.memory);
  }
  return MakeError(ErrorReason::kInvalidField,
                   "descriptor_token: expected a token that the descriptor socket answered, not used before and not older than its "
                   "lifetime, got another; send the descriptor again",
                   {{"field", "descriptor_token"}});
}

void DescriptorSocket::Run() {
  std::vector<Connection> connections;
  for (bool may_accept = true;;) {
    const bool listens = may_accept && connections.size() < static_cast<size_t>(options_.max_connections);
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}, {listens ? listener_.get() : -1, POLLIN, 0}};
    for (const Connection& connection : connections) polled.push_back({connection.socket.get(), POLLIN, 0});
    const bool ages = !may_accept || !connections.empty() || size() > 0;
    const int wait_ms = ages ? static_cast<int>(absl::ToInt64Milliseconds(kTick)) : -1;
    if (poll(polled.data(), polled.size(), wait_ms) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    const absl::Time now = MonotonicNow();
    std::vector<Connection> kept;
    for (size_t i = 0; i < connections.size(); ++i) {
      if (polled[i + 2].revents != 0) {
        Serve(connections[i]);
      } else if (now < connections[i].end) {
        kept.push_back(std::move(connections[i]));
      }
    }
    connections = std::move(kept);
    // Without descriptors left the listener would stay ready, and this thread busy.
    may_accept = polled[1].revents == 0 || Accept(&connections);
    ForgetOld(now);
  }
}

bool DescriptorSocket::Accept(std::vector<Connection>* connections) {
  FileDescriptor accepted(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (!accepted.valid() || getsockopt(accepted.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  // A forbidden client is refused after its packet: closing a connection with an unread packet loses the answer.
  const bool allowed = options_.any_user || peer.uid == geteuid() || peer.uid == 0;
  connections->push_back({std::move(accepted), peer.uid, allowed, MonotonicNow() + options_.request_timeout});
  return true;
}

void DescriptorSocket::Serve(const Connection& connection) {
  Packet packet = Receive(connection.socket.get());
  if (packet.bytes <= 0) return;  // it went away
  if (!connection.allowed) {
    return Answer(connection.socket.get(),
                  MakeError(ErrorReason::kPermissionDenied, "expected a process of the server's own user, or root"));
  }
  if (absl::Status status = CheckPacket(packet); !status.ok()) return Answer(connection.socket.get(), status);
  std::array<char, kDescriptorTokenBytes> token;
  if (getentropy(token.data(), token.size()) != 0) std::abort();  // the kernel always gives so few bytes
  {
    absl::MutexLock lock(&mutex_);
    if (absl::Status room = CheckRoom(connection.user); !room.ok()) return Answer(connection.socket.get(), room);
    waiting_.emplace(std::string(token.data(), token.size()),
                     Waiting{std::move(packet.descriptors.front()), connection.user, MonotonicNow() + options_.token_lifetime});
  }
  std::array<char, kDescriptorAnswerBytes> answer{};
  std::memcpy(answer.data(), kDescriptorMagic, sizeof(kDescriptorMagic));
  std::memcpy(answer.data() + 8, token.data(), token.size());
  std::memcpy(answer.data() + 8 + token.size(), options_.incarnation.data(), options_.incarnation.size());
  Send(connection.socket.get(), answer.data(), answer.size());
}

absl::Status DescriptorSocket::CheckRoom(uid_t user) const {
  const auto is_of_user = [user](const auto& entry) { return entry.second.user == user; };
  const int64_t of_user = std::count_if(waiting_.begin(), waiting_.end(), is_of_user);
  const int64_t of_all = static_cast<int64_t>(waiting_.size());
  if (of_user >= options_.max_user_tokens) {
    return TooManyWait("one user", "user_descriptors", options_.max_user_tokens, of_user + 1);
  }
  if (of_all >= options_.max_tokens) return TooManyWait("all users", "descriptors", options_.max_tokens, of_all + 1);
  return absl::OkStatus();
}

void DescriptorSocket::ForgetOld(absl::Time now) {
  std::vector<FileDescriptor> closed;  // without the lock
  absl::MutexLock lock(&mutex_);
  for (auto entry = waiting_.begin(); entry != waiting_.end();) {
    const auto old = entry++;
    if (now < old->second.end) continue;
    closed.push_back(std::move(old->second.memory));
    waiting_.erase(old);
  }
}

absl::StatusOr<std::unique_ptr<DescriptorSocket>> DescriptorSocket::Listen(const DescriptorSocketOptions& options) {
  std::error_code error;
  const std::string path = std::filesystem::absolute(options.path, error).string();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (options.path.empty() || error || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("descriptor_socket: expected a path of 1 to ", sizeof(address.sun_path) - 1, " bytes, got \"", path, "\""));
  }
  if (options.mode < 0 || options.mode > 0777) {
    return absl::InvalidArgumentError("descriptor_socket_mode: expected permissions from 0 to 0777, in octal");
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const auto cannot = [&](const char* what) {
    return absl::UnavailableError(absl::StrCat("descriptor_socket: ", path, ": ", what, ": ", std::strerror(errno)));
  };
  struct stat there {};
  if (lstat(path.c_str(), &there) == 0) {
    if (!S_ISSOCK(there.st_mode)) return absl::UnavailableError(absl::StrCat("descriptor_socket: ", path, " is no socket"));
    if (SomebodyListens(address, SOCK_SEQPACKET)) {
      return absl::UnavailableError(absl::StrCat("descriptor_socket: ", path, ": another process listens there"));
    }
    if (unlink(path.c_str()) != 0) return cannot("cannot remove what an earlier server left");
  }
  FileDescriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  FileDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!listener.valid() || !wake.valid()) return cannot("no descriptors are left");
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return cannot("cannot make it");
  // Clients are refused until it listens, whatever the umask permits.
  if (chmod(path.c_str(), static_cast<mode_t>(options.mode)) != 0 || listen(listener.get(), options.max_connections) != 0) {
    const absl::Status status = cannot("cannot listen");
    unlink(path.c_str());
    return status;
  }
  return std::unique_ptr<DescriptorSocket>(new DescriptorSocket(options, path, std::move(listener), std::move(wake)));
}

}  // namespace headwater::transport
