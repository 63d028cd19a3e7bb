#include "client/core/rows/memory/shared_region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/core/link/random_id.h"
#include "client/core/link/socket.h"

namespace headwater::client::internal {
namespace {

// How long a descriptor socket may take.
constexpr std::chrono::seconds kSocketTimeout{10};
constexpr char kMagic[4] = {'H', 'W', 'M', 'D'};
constexpr size_t kTokenBytes = 32;
constexpr size_t kIncarnationBytes = 16;
constexpr size_t kAnswerBytes = 8 + kTokenBytes + kIncarnationBytes;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are copied as they are");

absl::Status Failed(const std::string& what) { return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno))); }

}  // namespace

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedRegion::Make(int64_t bytes, bool named) {
  std::string name = named ? absl::StrCat("headwater-", RandomHexId()) : std::string();
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
  if (unlock_) unlock_();
  munmap(data_, static_cast<size_t>(bytes_));
  close(fd_);
  if (!name_.empty()) unlink(absl::StrCat("/dev/shm/", name_).c_str());
}

bool SharedRegion::LockOnce(const std::function<std::function<void()>()>& lock) const {
  std::lock_guard<std::mutex> one_at_a_time(mutex_);
  if (!lock_tried_) unlock_ = lock();
  lock_tried_ = true;
  return unlock_ != nullptr;
}

absl::StatusOr<std::string> PassDescriptor(const std::string& socket_path, int memfd, int64_t bytes, const std::string& incarnation,
                                           const Wait& wait) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string reach = absl::StrCat("the server's descriptor socket ", socket_path, " cannot be reached from here");
  if (socket_path.size() >= sizeof(address.sun_path)) return absl::UnavailableError(absl::StrCat(reach, ": its path is too long"));
  std::memcpy(address.sun_path, socket_path.c_str(), socket_path.size() + 1);
  const Deadline end = std::min<Deadline>(wait.deadline, std::chrono::system_clock::now() + kSocketTimeout);
  Socket server(AF_UNIX, SOCK_SEQPACKET, {end, wait.cancel});
  if (server.Connect(reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return Failed(reach);

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
  ssize_t moved = server.Do(POLLOUT, [&] { return sendmsg(server.fd(), &message, MSG_NOSIGNAL); });
  if (moved != static_cast<ssize_t>(request.size())) return Failed("the server's descriptor socket takes nothing");

  std::array<char, 8 + 256> answer{};
  moved = server.Do(POLLIN, [&] { return recv(server.fd(), answer.data(), answer.size(), 0); });
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
