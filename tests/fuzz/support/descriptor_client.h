// The unit tests' client of the descriptor socket. libFuzzer's clock, which is a signal, may cut its calls short.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_DESCRIPTOR_CLIENT_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_DESCRIPTOR_CLIENT_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/target.h"
#include "tests/unit/transport/descriptor_peer.h"
#include "tests/unit/transport/region_memory.h"

namespace headwater::fuzz {

inline constexpr int64_t kMemoryBytes = 4096;

inline transport::FileDescriptor ConnectTo(const std::string& path) {
  transport::FileDescriptor client;
  const auto connect = [&] { return (client = testing::ConnectTo(path)).valid() ? 0 : -1; };
  FUZZ_CHECK(Uninterrupted(connect) == 0, std::strerror(errno));
  return client;
}

// kMemoryBytes of memory that the socket takes if it is sealed.
inline transport::FileDescriptor MakeMemory(bool sealed) {
  return transport::FileDescriptor(testing::MakeMemory(kMemoryBytes, sealed ? testing::kAllSeals : 0));
}

// False if the kernel does not take the packet.
inline bool SendPacket(int socket, const std::string& bytes, const std::vector<int>& descriptors) {
  return Uninterrupted([&] { return testing::SendDescriptors(socket, bytes, descriptors) ? 0 : -1; }) == 0;
}

// The answer, or what recv() says instead.
inline ssize_t ReceiveAnswer(int socket, char* data, size_t size) {
  return Uninterrupted([&] { return recv(socket, data, size, 0); });
}

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_DESCRIPTOR_CLIENT_H_
