// FileDescriptor: owns a file descriptor and closes it.
#ifndef HEADWATER_SERVER_TRANSPORT_FILE_DESCRIPTOR_H_
#define HEADWATER_SERVER_TRANSPORT_FILE_DESCRIPTOR_H_

#include <unistd.h>

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

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_FILE_DESCRIPTOR_H_
