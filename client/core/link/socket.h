// Socket: system calls on a socket, each for as long as a Wait says.
#ifndef HEADWATER_CLIENT_CORE_LINK_SOCKET_H_
#define HEADWATER_CLIENT_CORE_LINK_SOCKET_H_

#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <stop_token>
#include <utility>

#include "client/core/link/wait.h"

namespace headwater::client::internal {

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

// Used by one thread. Where the system gives no socket every call fails with the system's errno.
class Socket {
 public:
  // A socket that does not block. Cancelling the wait wakes its waiters.
  Socket(int family, int type, Wait wait);

  int fd() const { return socket_.fd; }
  // The caller closes it.
  int Release() { return socket_.Release(); }

  // Connects: 0, or -1 with errno as Do() sets it.
  ssize_t Connect(const sockaddr* address, socklen_t length);
  // Repeats a system call until it asks for no more patience: its result, or -1 with errno (ETIMEDOUT where the wait has ended).
  // `events`: the events for poll(); 0: no event reports when to try again.
  template <typename Call>
  ssize_t Do(short events, const Call& call) {
    errno = error_;
    ssize_t result = -1;
    while (error_ == 0 && (result = call()) < 0 && MayAskAgain(events)) {
    }
    return result;
  }

 private:
  // After a call that has failed: waits until it may be made again; false, with errno, if it has failed for good.
  bool MayAskAgain(short events);

  const Wait wait_;
  Descriptor socket_;
  const Descriptor wake_;
  const int error_;                                            // why there is no socket; 0: there is one
  const std::stop_callback<std::function<void()>> on_cancel_;  // goes first
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_SOCKET_H_
