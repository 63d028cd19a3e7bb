// TCP sockets of the communicator: descriptors that close themselves, connecting and listening with deadlines.
#ifndef HEADWATER_KERNELS_COMM_TCP_SOCKET_H_
#define HEADWATER_KERNELS_COMM_TCP_SOCKET_H_

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace headwater::comm {

using Clock = std::chrono::steady_clock;

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }  // -1: none
  bool open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// All sockets are non-blocking and closed by exec. Errors are kEngineFailed and name `what`.
absl::Status SocketError(const std::string& what, int error_number);

// Listens at a port of the system's choice, which goes to *port.
absl::StatusOr<Socket> ListenTcp(const std::string& host, int32_t* port);
// Tries again until `deadline` as long as nobody listens there.
absl::StatusOr<Socket> ConnectTcp(const std::string& address, Clock::time_point deadline);
// The next connection. DeadlineExceeded.
absl::StatusOr<Socket> AcceptTcp(const Socket& listener, Clock::time_point deadline);

// Moves exactly `bytes`. DeadlineExceeded; another error for a connection that is lost.
absl::Status SendAll(const Socket& socket, const void* data, size_t bytes, Clock::time_point deadline);
absl::Status ReceiveAll(const Socket& socket, void* data, size_t bytes, Clock::time_point deadline);

}  // namespace headwater::comm

#endif  // HEADWATER_KERNELS_COMM_TCP_SOCKET_H_
