// TCP sockets of the communicator: descriptors that close themselves, connecting and listening with deadlines.
#ifndef HEADWATER_KERNELS_COMM_TCP_SOCKET_H_
#define HEADWATER_KERNELS_COMM_TCP_SOCKET_H_

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/communicator.h"

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

// How long something is waited for.
struct Patience {
  Clock::time_point deadline;
  const std::function<bool()>& cancelled;  // asked several times a second

  // OK as long as it lasts; else DeadlineExceeded or Cancelled, which the functions below return then.
  absl::Status Check() const;
};
// Between two questions.
inline constexpr std::chrono::milliseconds kLook(50);

// All sockets are non-blocking and closed by exec. Errors are kEngineFailed and name `what`.
absl::Status SocketError(const std::string& what, int error_number);

// Listens at an IP address, as headwater::ListenTcp() does, and a port of the system's choice, which goes to *port.
absl::StatusOr<Socket> ListenAtAnyPort(const std::string& host, int32_t* port);
// Connects to `address`, and tries again until a process listens there. `address` is host:port, an IPv6 host in brackets; without a
// host, ":port", it is one of this machine's loopback addresses.
absl::StatusOr<Socket> ConnectTcp(const std::string& address, const Patience& patience);
// The next connection, if one is there; else a socket that is not open.
absl::StatusOr<Socket> AcceptTcp(const Socket& listener);

// Moves exactly `bytes`. kEngineFailed for a connection that is lost.
absl::Status SendAll(const Socket& socket, const void* data, size_t bytes, const Patience& patience);
absl::Status ReceiveAll(const Socket& socket, void* data, size_t bytes, const Patience& patience);

// The communicator of rank `rank`, once it is connected with all others: peers[r] with rank r; the own one, peers[rank], is empty.
std::unique_ptr<Communicator> MakeTcpCommunicator(int32_t rank, std::vector<Socket> peers);

}  // namespace headwater::comm

#endif  // HEADWATER_KERNELS_COMM_TCP_SOCKET_H_
