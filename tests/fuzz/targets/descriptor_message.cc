// The descriptor socket's packet, over a real socket. Input: a byte that says what comes with the packet (0 to 3 descriptors, and
// of which kind), then the packet.
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "server/transport/descriptor_socket.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/descriptor_client.h"
#include "tests/fuzz/support/target.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::fuzz {
namespace {

using transport::FileDescriptor;

transport::DescriptorSocket& Socket() {
  static const testing::TemporaryDirectory directory;
  static const std::unique_ptr<transport::DescriptorSocket> socket = [] {
    return *transport::DescriptorSocket::Listen(transport::DescriptorSocketOptions{.path = directory.path() + "/socket"});
  }();
  return *socket;
}

// Descriptors that stay open, so that an execution costs no more than it must.
int Descriptor(int kind) {
  static const FileDescriptor sealed = MakeMemory(true);
  static const FileDescriptor plain = MakeMemory(false);
  static const FileDescriptor null(open("/dev/null", O_RDWR | O_CLOEXEC));
  return kind == 0 ? sealed.get() : kind == 1 ? plain.get() : null.get();
}

// Whether the packet is as the protocol says, told once more.
bool IsRight(const std::string& packet, size_t count, int kind) {
  uint32_t version = 0;
  int64_t bytes = 0;
  if (packet.size() != 16 || packet.compare(0, 4, "HWMD") != 0 || count != 1 || kind != 0) return false;
  std::memcpy(&version, packet.data() + 4, sizeof(version));
  std::memcpy(&bytes, packet.data() + 8, sizeof(bytes));
  return version == 1 && bytes == kMemoryBytes;
}

}  // namespace
}  // namespace headwater::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace headwater::fuzz;  // NOLINT(google-build-using-namespace)
  namespace transport = headwater::transport;
  InputReader input(data, size);
  const uint8_t what = input.Byte();
  const size_t count = what % 4;
  const int kind = what / 4 % 3;
  const std::string packet = input.Rest();
  transport::DescriptorSocket& socket = Socket();

  const transport::FileDescriptor client = ConnectTo(socket.path());
  // A server that hangs is one here too, which libFuzzer's timeout finds.
  if (!SendPacket(client.get(), packet, std::vector<int>(count, Descriptor(kind)))) return 0;
  std::array<char, 1024> answer{};
  const ssize_t bytes = ReceiveAnswer(client.get(), answer.data(), answer.size());
  if (packet.empty()) {
    FUZZ_CHECK(bytes <= 0);  // a packet of nothing looks like the end
    return 0;
  }
  FUZZ_CHECK(bytes >= 8);
  FUZZ_CHECK(std::memcmp(answer.data(), transport::kDescriptorMagic, 4) == 0);
  uint32_t code = 0;
  std::memcpy(&code, answer.data() + 4, sizeof(code));
  FUZZ_CHECK((code == 0) == IsRight(packet, count, kind), std::string(answer.data() + 8));
  if (code != 0) {
    FUZZ_CHECK(code <= 16 && static_cast<size_t>(bytes) <= 8 + transport::kDescriptorMaxErrorBytes);
    for (ssize_t i = 8; i < bytes; ++i) FUZZ_CHECK(answer[static_cast<size_t>(i)] >= 0x20 && answer[static_cast<size_t>(i)] < 0x7f);
    return 0;
  }
  FUZZ_CHECK(static_cast<size_t>(bytes) == transport::kDescriptorAnswerBytes);
  const std::string token(answer.data() + 8, transport::kDescriptorTokenBytes);
  FUZZ_CHECK(socket.Take(token).ok());
  FUZZ_CHECK(!socket.Take(token).ok());
  FUZZ_CHECK(!socket.Take(packet).ok());
  FUZZ_CHECK(socket.size() == 0);
  return 0;
}
