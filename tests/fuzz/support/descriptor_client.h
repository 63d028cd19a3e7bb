// The client's side of the descriptor socket, as docs/api.md writes it.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_DESCRIPTOR_CLIENT_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_DESCRIPTOR_CLIENT_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "server/transport/file_descriptor.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/uninterrupted.h"

namespace headwater::fuzz {

inline constexpr size_t kMaxSentDescriptors = 3;
inline constexpr int64_t kMemoryBytes = 4096;

inline transport::FileDescriptor ConnectTo(const std::string& path) {
  transport::FileDescriptor client(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int connected =
      Uninterrupted([&] { return connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)); });
  FUZZ_CHECK(connected == 0, std::strerror(errno));
  return client;
}

// kMemoryBytes of memory that the socket takes if it is sealed.
inline transport::FileDescriptor MakeMemory(bool sealed) {
  transport::FileDescriptor memory(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  FUZZ_CHECK(memory.valid());
  FUZZ_CHECK(posix_fallocate(memory.get(), 0, kMemoryBytes) == 0);
  if (sealed) FUZZ_CHECK(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  return memory;
}

// The packet of a well-behaved client.
inline std::string DescriptorPacket() {
  const uint32_t version = 1;
  std::string packet = "HWMD";
  packet.append(reinterpret_cast<const char*>(&version), sizeof(version));
  packet.append(reinterpret_cast<const char*>(&kMemoryBytes), sizeof(kMemoryBytes));
  return packet;
}

// At most kMaxSentDescriptors. False if the kernel does not take it.
inline bool SendPacket(int socket, const std::string& bytes, const std::vector<int>& descriptors) {
  iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxSentDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const size_t payload = descriptors.size() * sizeof(int);
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(payload);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(payload);
    std::memcpy(CMSG_DATA(header), descriptors.data(), payload);
  }
  return Uninterrupted([&] { return sendmsg(socket, &message, MSG_NOSIGNAL); }) >= 0;
}

// The answer, or what recv() says instead.
inline ssize_t ReceiveAnswer(int socket, char* data, size_t size) {
  return Uninterrupted([&] { return recv(socket, data, size, 0); });
}

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_DESCRIPTOR_CLIENT_H_
