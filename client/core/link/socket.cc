#include "client/core/link/socket.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdint>

namespace headwater::client::internal {
namespace {

// How soon a Unix socket whose queue of connections is full is asked again.
constexpr int64_t kFullQueueMs = 5;

}  // namespace

Socket::Socket(int family, int type, Wait wait)
    : wait_(std::move(wait)),
      socket_(socket(family, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      error_(socket_.fd < 0 || wake_.fd < 0 ? errno : 0),
      on_cancel_(wait_.cancel, [this] { eventfd_write(wake_.fd, 1); }) {}

ssize_t Socket::Connect(const sockaddr* address, socklen_t length) {
  // While the queue of a Unix socket is full connect() fails, and no event reports that it has room.
  return Do(address->sa_family == AF_UNIX ? 0 : POLLOUT, [&] { return connect(socket_.fd, address, length); });
}

bool Socket::MayAskAgain(short events) {
  if (errno == EINTR) return true;
  if (errno != EAGAIN && errno != EINPROGRESS && errno != EALREADY) return false;
  const int64_t left = std::chrono::ceil<std::chrono::milliseconds>(wait_.deadline - std::chrono::system_clock::now()).count();
  if (wait_.cancel.stop_requested() || left <= 0) {
    errno = ETIMEDOUT;
    return false;
  }
  pollfd ready[] = {{wake_.fd, POLLIN, 0}, {socket_.fd, events, 0}};
  poll(ready, events == 0 ? 1 : 2, static_cast<int>(std::min<int64_t>(left, events == 0 ? kFullQueueMs : INT_MAX)));
  return true;
}

}  // namespace headwater::client::internal
