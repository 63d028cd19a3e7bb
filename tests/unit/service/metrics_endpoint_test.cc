// The endpoint of metrics, over loopback: what it answers, and that nobody holds it up.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "server/observability/metrics.h"

namespace headwater::observability {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A connection; -1 if it cannot be made.
class Connection {
 public:
  explicit Connection(int port, int family = AF_INET) : fd_(socket(family, SOCK_STREAM, 0)) {
    sockaddr_in four{};
    four.sin_family = AF_INET;
    four.sin_port = htons(static_cast<uint16_t>(port));
    four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sockaddr_in6 six{};
    six.sin6_family = AF_INET6;
    six.sin6_port = four.sin_port;
    six.sin6_addr = in6addr_loopback;
    connected_ = (family == AF_INET ? connect(fd_, reinterpret_cast<sockaddr*>(&four), sizeof(four))
                                    : connect(fd_, reinterpret_cast<sockaddr*>(&six), sizeof(six))) == 0;
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  bool connected() const { return connected_; }
  bool Send(const std::string& bytes) {
    return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  // What comes first.
  std::string ReadSome() {
    char buffer[4096];
    const ssize_t count = read(fd_, buffer, sizeof(buffer));
    return {buffer, static_cast<size_t>(count > 0 ? count : 0)};
  }
  // All that comes before the other side closes.
  std::string Read() {
    std::string text;
    char buffer[4096];
    for (ssize_t count = 0; (count = read(fd_, buffer, sizeof(buffer))) > 0;) text.append(buffer, static_cast<size_t>(count));
    return text;
  }

 private:
  const int fd_;
  bool connected_ = false;
};

std::string Ask(int port, const std::string& method, const std::string& path, int family = AF_INET) {
  Connection connection(port, family);
  EXPECT_TRUE(connection.connected());
  EXPECT_TRUE(connection.Send(method + " " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"));
  return connection.Read();
}

std::unique_ptr<MetricsEndpoint> Listening(std::function<std::string()> page = [] { return std::string("a 1\n"); }) {
  auto endpoint = MetricsEndpoint::Listen("127.0.0.1:0", std::move(page));
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  EXPECT_NE((*endpoint)->port(), 0);
  return *std::move(endpoint);
}

TEST(MetricsEndpoint, AnswersWhatPrometheusAsks) {
  std::atomic<int> scrapes{0};
  const auto endpoint =
      Listening([&scrapes] { return "scrapes " + std::to_string(++scrapes) + "\n" + std::string(1 << 20, '#') + "\n"; });
  for (int i = 1; i <= 3; ++i) {
    const std::string answer = Ask(endpoint->port(), "GET", "/metrics");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
    EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    EXPECT_THAT(answer, HasSubstr("\r\n\r\nscrapes " + std::to_string(i) + "\n"));
    EXPECT_THAT(answer, EndsWith("##\n"));
  }
  const std::string head = Ask(endpoint->port(), "HEAD", "/metrics");
  EXPECT_THAT(head, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(head, EndsWith("\r\n\r\n"));
}

TEST(MetricsEndpoint, RefusesWhatIsNoScrape) {
  const auto endpoint = Listening();
  EXPECT_THAT(Ask(endpoint->port(), "GET", "/"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask(endpoint->port(), "GET", "/metrics/"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask(endpoint->port(), "POST", "/metrics"), StartsWith("HTTP/1.1 405"));
  EXPECT_THAT(Ask(endpoint->port(), "DELETE", "/metrics"), HasSubstr("Allow: GET, HEAD\r\n"));
  EXPECT_THAT(Ask(endpoint->port(), "GET", "/metrics"), EndsWith("\r\n\r\na 1\n"));
}

TEST(MetricsEndpoint, NobodyHoldsUpOthersOrTheEnd) {
  auto endpoint = Listening();
  std::deque<Connection> still;
  for (unsigned i = 0; i + 1 < MetricsEndpoint::kMaxConnections; ++i) {
    ASSERT_TRUE(still.emplace_back(endpoint->port()).connected());
    if (i % 2 == 1) {
      ASSERT_TRUE(still.back().Send("GET /metrics HTTP/1.1\r\nHo"));
    }
  }
  EXPECT_THAT(Ask(endpoint->port(), "GET", "/metrics"), EndsWith("a 1\n"));  // the last one that there is room for
  endpoint.reset();
  for (Connection& connection : still) EXPECT_EQ(connection.Read(), "");
}

TEST(MetricsEndpoint, OneConnectionTooManyWaitsForAnotherToEnd) {
  std::atomic<int> scrapes{0};
  const auto endpoint = Listening([&scrapes] { return "scrapes " + std::to_string(++scrapes) + "\n"; });
  const std::string request = "GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n";
  std::deque<Connection> open;
  for (unsigned i = 0; i < MetricsEndpoint::kMaxConnections; ++i) ASSERT_TRUE(open.emplace_back(endpoint->port()).connected());
  for (Connection& connection : open) {
    ASSERT_TRUE(connection.Send(request));
    EXPECT_THAT(connection.ReadSome(), StartsWith("HTTP/1.1 200"));  // and is kept alive
  }
  Connection one_more(endpoint->port());  // the kernel connects
  ASSERT_TRUE(one_more.connected());
  ASSERT_TRUE(one_more.Send(request));
  ASSERT_TRUE(
      open.back().Send(request));  // had the other been accepted before this one was answered, it would have been answered as well
  EXPECT_THAT(open.back().ReadSome(), HasSubstr("scrapes " + std::to_string(MetricsEndpoint::kMaxConnections + 1) + "\n"));
  open.pop_front();
  EXPECT_THAT(one_more.ReadSome(), HasSubstr("scrapes " + std::to_string(MetricsEndpoint::kMaxConnections + 2) + "\n"));
}

TEST(MetricsEndpoint, SaysWhyItCannotListen) {
  const auto first = Listening();
  const auto page = [] { return std::string(); };
  const auto taken = MetricsEndpoint::Listen("127.0.0.1:" + std::to_string(first->port()), page);
  ASSERT_FALSE(taken.ok());
  EXPECT_TRUE(absl::IsUnavailable(taken.status())) << taken.status();
  EXPECT_THAT(std::string(taken.status().message()), StartsWith("metrics: cannot listen on 127.0.0.1:"));
  for (const char* address : {"", ":", "127.0.0.1", "127.0.0.1:", ":9464", "127.0.0.1:http-of-another-kind", "no such host:9464"}) {
    const auto refused = MetricsEndpoint::Listen(address, page);
    ASSERT_FALSE(refused.ok()) << address;
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("expected host:port")) << address;
  }
}

// Whether this machine has an IPv6 address of that name.
bool HasIPv6(const char* name) {
  addrinfo hints{};
  hints.ai_family = AF_INET6;
  addrinfo* found = nullptr;
  if (getaddrinfo(name, nullptr, &hints, &found) != 0) return false;
  const int probe = socket(AF_INET6, SOCK_STREAM, 0);
  const bool is_there = probe >= 0 && bind(probe, found->ai_addr, found->ai_addrlen) == 0;
  if (probe >= 0) close(probe);
  freeaddrinfo(found);
  return is_there;
}

// One address for machines with either family and with both, as gRPC has it.
TEST(MetricsEndpoint, ListensOnBothFamilies) {
  if (!HasIPv6("::1")) GTEST_SKIP() << "this machine has no IPv6 loopback";
  for (const std::string host : {"0.0.0.0", "[::]", "::", "localhost", "[::1]", "127.0.0.1"}) {
    const bool four = host != "[::1]";
    const bool six = host != "127.0.0.1" && (host != "localhost" || HasIPv6("localhost"));
    const auto endpoint = MetricsEndpoint::Listen(host + ":0", [] { return std::string("a 1\n"); });
    ASSERT_TRUE(endpoint.ok()) << host << ": " << endpoint.status();
    const int port = (*endpoint)->port();
    EXPECT_NE(port, 0);
    EXPECT_EQ(Connection(port, AF_INET).connected(), four) << host;
    EXPECT_EQ(Connection(port, AF_INET6).connected(), six) << host;
    if (four) {
      EXPECT_THAT(Ask(port, "GET", "/metrics", AF_INET), EndsWith("\r\n\r\na 1\n")) << host;
    }
    if (six) {
      EXPECT_THAT(Ask(port, "GET", "/metrics", AF_INET6), EndsWith("\r\n\r\na 1\n")) << host;
    }
  }
}

}  // namespace
}  // namespace headwater::observability
