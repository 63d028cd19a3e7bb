#include "client/cpp/src/memory/shared_region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace headwater::client::internal {
namespace {

constexpr int kWaitMs = 10000;
constexpr char kMagic[4] = {'H', 'W', 'M', 'D'};
constexpr size_t kTokenBytes = 32;
constexpr size_t kIncarnationBytes = 16;
constexpr size_t kAnswerBytes = 8 + kTokenBytes + kIncarnationBytes;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are copied as they are");

// Closes at the end of its scope.
struct Descriptor {
  explicit Descriptor(int descriptor) : fd(descriptor) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  int Release() { return std::exchange(fd, -1); }
  int fd;
};

absl::Status Failed(const std::string& what) { return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno))); }

}  // namespace

std::string RandomDigits(int bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (int i = 0; i < bytes; ++i) {
    unsigned char byte = 0;
    if (getentropy(&byte, 1) != 0) byte = static_cast<unsigned char>(i);  // unknown to Linux since 3.17
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedRegion::Make(int64_t bytes, bool named) {
  std::string name = named ? absl::StrCat("headwater-", RandomDigits(16)) : std::string();
  const std::string path = absl::StrCat("/dev/shm/", name);
  Descriptor memory(named ? open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600)
                          : memfd_create("headwater", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.fd < 0) return Failed("the system makes no shared memory");
  const auto undo = [&](const char* what) {
    const absl::Status status = Failed(what);
    if (named) unlink(path.c_str());
    return status;
  };
  if (ftruncate(memory.fd, bytes) != 0) return undo("shared memory cannot have that size");
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
  if (data == MAP_FAILED) return undo("shared memory cannot be mapped");
  // Fewer, larger pages where the system has them for shared memory; before the pages are made.
  static_cast<void>(madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE));
  const bool allocated = fallocate(memory.fd, 0, 0, bytes) == 0;
  if (!allocated || (!named && fcntl(memory.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
    const absl::Status status = undo(allocated ? "shared memory cannot be sealed" : "there is not so much shared memory");
    munmap(data, static_cast<size_t>(bytes));
    return status;
  }
  return std::shared_ptr<const SharedRegion>(
      new SharedRegion(memory.Release(), std::move(name), static_cast<uint8_t*>(data), bytes));
}

SharedRegion::~SharedRegion() {
  if (end_) end_();
  munmap(data_, static_cast<size_t>(bytes_));
  close(fd_);
  if (!name_.empty()) unlink(absl::StrCat("/dev/shm/", name_).c_str());
}

void SharedRegion::AtEnd(std::function<void()> end) const {
  std::lock_guard<std::mutex> lock(mutex_);
  end_ = std::move(end);
}

bool SharedRegion::has_end() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return end_ != nullptr;
}

absl::StatusOr<std::string> PassDescriptor(const std::string& socket_path, int memfd, int64_t bytes,
                                           const std::string& incarnation) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string reach = absl::StrCat("the server's descriptor socket ", socket_path, " cannot be reached from here");
  if (socket_path.size() >= sizeof(address.sun_path)) return absl::UnavailableError(absl::StrCat(reach, ": its path is too long"));
  std::memcpy(address.sun_path, socket_path.c_str(), socket_path.size() + 1);
  const Descriptor connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const timeval wait = {kWaitMs / 1000, 0};
  if (connection.fd < 0 || setsockopt(connection.fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait)) != 0 ||
      setsockopt(connection.fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) != 0 ||
      connect(connection.fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Failed(reach);
  }

  std::array<char, 16> request{};
  const uint32_t version = 1;
  std::memcpy(request.data(), kMagic, sizeof(kMagic));
  std::memcpy(request.data() + 4, &version, sizeof(version));
  std::memcpy(request.data() + 8, &bytes, sizeof(bytes));
  iovec part = {request.data(), request.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &memfd, sizeof(int));
  ssize_t moved = 0;
  do {
    moved = sendmsg(connection.fd, &message, MSG_NOSIGNAL);
  } while (moved < 0 && errno == EINTR);
  if (moved != static_cast<ssize_t>(request.size())) return Failed("the server's descriptor socket takes nothing");

  std::array<char, 8 + 256> answer{};
  do {
    moved = recv(connection.fd, answer.data(), answer.size(), 0);
  } while (moved < 0 && errno == EINTR);
  if (moved < 0) return Failed("the server's descriptor socket does not answer");
  uint32_t code = 0;
  std::memcpy(&code, answer.data() + 4, sizeof(code));
  if (moved < 8 || std::memcmp(answer.data(), kMagic, sizeof(kMagic)) != 0 ||
      (code == 0 && moved != static_cast<ssize_t>(kAnswerBytes))) {
    return absl::UnavailableError("what listens on the server's descriptor socket speaks another protocol");
  }
  if (code != 0) {
    return absl::UnavailableError(
        absl::StrCat("the server's descriptor socket refuses: ", std::string(answer.data() + 8, static_cast<size_t>(moved) - 8)));
  }
  if (std::string(answer.data() + 8 + kTokenBytes, kIncarnationBytes) != incarnation) {
    return absl::UnavailableError(absl::StrCat("the descriptor socket ", socket_path, " of this host belongs to another server"));
  }
  return std::string(answer.data() + 8, kTokenBytes);
}

}  // namespace headwater::client::internal
