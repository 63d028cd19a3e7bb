// What the gate calls a client must be what gRPC calls it: a connection is dropped by that name.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "server/guard/connection_gate.h"

namespace headwater::guard {
namespace {

template <typename Address>
std::string NameOf(const Address& address) {
  sockaddr_storage storage{};
  std::memcpy(&storage, &address, sizeof(address));
  return PeerName(storage);
}

std::string NameOfV6(const char* host, uint32_t zone) {
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(4711);
  six.sin6_scope_id = zone;
  EXPECT_EQ(inet_pton(AF_INET6, host, &six.sin6_addr), 1);
  return NameOf(six);
}

TEST(PeerName, IsWhatGrpcCallsIt) {
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = htons(4711);
  ASSERT_EQ(inet_pton(AF_INET, "10.0.0.1", &four.sin_addr), 1);
  EXPECT_EQ(NameOf(four), "ipv4:10.0.0.1:4711");
  EXPECT_EQ(NameOfV6("::1", 0), "ipv6:%5B::1%5D:4711");
  EXPECT_EQ(NameOfV6("::ffff:10.0.0.1", 0), "ipv4:10.0.0.1:4711");
  EXPECT_EQ(NameOfV6("fe80::1", 4), "ipv6:%5Bfe80::1%254%5D:4711");
  sockaddr_un local{};
  local.sun_family = AF_UNIX;
  EXPECT_EQ(NameOf(local), "");
}

}  // namespace
}  // namespace headwater::guard
