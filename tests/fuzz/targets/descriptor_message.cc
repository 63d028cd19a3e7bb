// The descriptor socket's packet, over a real socket. Input: a byte that says what comes with the packet (0 to 3 descriptors, and
// of which kind), then the packet.
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "server/transport/descriptor_socket.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/target.h"
#include "tests/unit/server/temporary_directory.h"
#include "tests/unit/transport/descriptor_peer.h"
#include "tests/unit/transport/region_memory.h"

namespace headwater::fuzz {

void CheckInput(InputReader input) {
  using transport::FileDescriptor;
  constexpr int64_t kMemoryBytes = 4096;
  static const testing::TemporaryDirectory directory;
  static const auto socket = transport::DescriptorSocket::Listen({.path = directory.path() + "/socket"}).value();
  // They stay open, so that an execution costs no more than it must. The socket takes the first one alone.
  static const FileDescriptor kinds[] = {FileDescriptor(testing::MakeMemory(kMemoryBytes)),
                                         FileDescriptor(testing::MakeMemory(kMemoryBytes, /*seals=*/0)),
                                         FileDescriptor(open("/dev/null", O_RDWR | O_CLOEXEC))};
  const uint8_t what = input.Byte();
  const size_t count = what % 4;
  const int kind = what / 4 % 3;
  const std::string packet = input.Rest();

  const FileDescriptor client = testing::ConnectTo(socket->path());
  FUZZ_CHECK(client.valid(), std::strerror(errno));
  // A server that hangs is one here too, which libFuzzer's timeout finds.
  if (!testing::SendDescriptors(client.get(), packet, std::vector<int>(count, kinds[kind].get()))) return;
  std::array<char, 1024> answer{};
  const ssize_t bytes = recv(client.get(), answer.data(), answer.size(), 0);
  if (packet.empty()) {
    FUZZ_CHECK(bytes <= 0);  // a packet of nothing looks like the end
    return;
  }
  FUZZ_CHECK(bytes >= 8);
  FUZZ_CHECK(std::memcmp(answer.data(), transport::kDescriptorMagic, 4) == 0);
  uint32_t code = 0;
  std::memcpy(&code, answer.data() + 4, sizeof(code));
  const bool right = packet == testing::DescriptorRequest(kMemoryBytes) && count == 1 && kind == 0;
  FUZZ_CHECK((code == 0) == right, std::string(answer.data() + 8));
  if (code != 0) {
    FUZZ_CHECK(code <= 16 && static_cast<size_t>(bytes) <= 8 + transport::kDescriptorMaxErrorBytes);
    for (ssize_t i = 8; i < bytes; ++i) FUZZ_CHECK(answer[static_cast<size_t>(i)] >= 0x20 && answer[static_cast<size_t>(i)] < 0x7f);
    return;
  }
  FUZZ_CHECK(static_cast<size_t>(bytes) == transport::kDescriptorAnswerBytes);
  const std::string token(answer.data() + 8, transport::kDescriptorTokenBytes);
  FUZZ_CHECK(socket->Take(token).ok());
  FUZZ_CHECK(!socket->Take(token).ok());
  FUZZ_CHECK(!socket->Take(packet).ok());
  FUZZ_CHECK(socket->size() == 0);
}

}  // namespace headwater::fuzz
