// FileDescriptor: owns a file descriptor and closes it. SomebodyListens: whether a Unix socket that a process made is in use.
#ifndef HEADWATER_SERVER_TRANSPORT_FILE_DESCRIPTOR_H_
#define HEADWATER_SERVER_TRANSPORT_FILE_DESCRIPTOR_H_

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace headwater::transport {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  // Takes over `fd`; negative: none.
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~FileDescriptor() { Close(); }

  bool valid() const { return fd_ >= 0; }
  int get() const { return fd_; }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// Whether a process may listen at `address` with sockets of `type` (SOCK_STREAM, SOCK_SEQPACKET): false only if refused.
inline bool SomebodyListens(const sockaddr_un& address, int type) {
  const FileDescriptor probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return true;
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 || errno != ECONNREFUSED;
}

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_FILE_DESCRIPTOR_H_
