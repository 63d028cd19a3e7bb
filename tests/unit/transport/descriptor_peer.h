// The client's side of the descriptor socket, as docs/api.md writes it, and not with the server's constants.
#ifndef HEADWATER_TESTS_UNIT_TRANSPORT_DESCRIPTOR_PEER_H_
#define HEADWATER_TESTS_UNIT_TRANSPORT_DESCRIPTOR_PEER_H_

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "server/transport/file_descriptor.h"

namespace headwater::testing {

// Not valid if nobody listens.
inline transport::FileDescriptor ConnectTo(const std::string& path) {
  transport::FileDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return transport::FileDescriptor();
  return fd;
}

inline std::string DescriptorRequest(uint64_t bytes, const std::string& magic = "HWMD", uint32_t version = 1) {
  std::string packet = magic;
  packet.append(reinterpret_cast<const char*>(&version), 4);
  packet.append(reinterpret_cast<const char*>(&bytes), 8);
  return packet;
}

inline bool SendDescriptors(int socket, const std::string& packet, const std::vector<int>& descriptors) {
  std::string data = packet;
  iovec part = {data.data(), data.size()};
  std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(data.size());
}

struct DescriptorAnswer {
  bool came = false;  // false: the connection was closed without one
  uint32_t code = 0;
  std::string token;
  std::string incarnation;
  std::string message;
};

inline DescriptorAnswer ReadDescriptorAnswer(int socket) {
  DescriptorAnswer answer;
  pollfd polled = {socket, POLLIN, 0};
  if (poll(&polled, 1, 20000) != 1) ADD_FAILURE() << "no answer";
  char data[512];
  const ssize_t bytes = recv(socket, data, sizeof(data), 0);
  if (bytes < 8) return answer;
  answer.came = true;
  EXPECT_EQ(std::string(data, 4), "HWMD");
  std::memcpy(&answer.code, data + 4, 4);
  if (answer.code != 0) {
    answer.message.assign(data + 8, static_cast<size_t>(bytes) - 8);
    return answer;
  }
  EXPECT_EQ(bytes, 56);
  answer.token.assign(data + 8, 32);
  answer.incarnation.assign(data + 40, 16);
  return answer;
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_TRANSPORT_DESCRIPTOR_PEER_H_
