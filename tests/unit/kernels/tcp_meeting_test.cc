// How ranks find each other over TCP in the company of strangers; and how they notice one that hangs beside others that do not.
#include <poll.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "kernels/comm/tcp_handshake.h"
#include "kernels/comm/tcp_socket.h"
#include "tests/unit/expect_status.h"

namespace headwater::comm {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience(60);
constexpr char kSecret[] = "0123456789abcdefFEDCBA9876543210";
constexpr char kOtherSecret[] = "0123456789abcdefFEDCBA9876543211";

const std::function<bool()> kNever = [] { return false; };

Patience Patient() { return {Clock::now() + kPatience, kNever}; }

std::unique_ptr<TcpMeeting> Listen() {
  auto meeting = TcpMeeting::Listen("127.0.0.1");
  EXPECT_TRUE(meeting.ok()) << meeting.status();
  return *std::move(meeting);
}

std::string AddressOf(int32_t port) { return "127.0.0.1:" + std::to_string(port); }

absl::StatusOr<std::unique_ptr<Communicator>> Meet(TcpMeeting& meeting, int32_t rank, const std::vector<std::string>& addresses,
                                                   const std::string& secret = kSecret,
                                                   const std::function<bool()>& cancelled = kNever) {
  return meeting.Meet(rank, addresses, secret, kPatience, cancelled);
}

Socket Connect(const std::string& address) {
  auto socket = ConnectTcp(address, Patient());
  EXPECT_TRUE(socket.ok()) << socket.status();
  return *std::move(socket);
}

Socket AwaitCaller(const Socket& listener) {
  while (true) {
    auto socket = AcceptTcp(listener);
    EXPECT_TRUE(socket.ok()) << socket.status();
    if (!socket.ok() || socket->open()) return *std::move(socket);
    pollfd waiting = {listener.fd(), POLLIN, 0};
    poll(&waiting, 1, 1000);
  }
}

TEST(TcpHandshake, AProofIsGoodForOneConnectionOnly) {
  const Challenge challenge = *MakeChallenge();
  const Claim claim = *MakeClaim(kSecret, 2, 1, challenge);
  EXPECT_TRUE(IsTrue(kSecret, 1, challenge, claim));
  EXPECT_FALSE(IsTrue(kOtherSecret, 1, challenge, claim));
  EXPECT_FALSE(IsTrue(kSecret, 0, challenge, claim));
  EXPECT_FALSE(IsTrue(kSecret, 1, *MakeChallenge(), claim));
  Claim other = claim;
  other.rank = 3;
  EXPECT_FALSE(IsTrue(kSecret, 1, challenge, other));
  other = claim;
  other.nonce[0] ^= 1;
  EXPECT_FALSE(IsTrue(kSecret, 1, challenge, other));

  const Verdict verdict = MakeVerdict(kSecret, 1, challenge, claim);
  EXPECT_TRUE(IsTrue(kSecret, 1, challenge, claim, verdict));
  EXPECT_FALSE(IsTrue(kOtherSecret, 1, challenge, claim, verdict));
  EXPECT_FALSE(IsTrue(kSecret, 1, challenge, other, verdict));
  EXPECT_FALSE(IsTrue(kSecret, 1, challenge, claim, Verdict()));
  EXPECT_FALSE(IsTrue(kSecret, 1, challenge, claim, {1, claim.proof}));  // it gets its own proof back
  EXPECT_FALSE(IsTrue(kSecret, 1, challenge, claim, {0, verdict.proof}));

  Challenge strange = challenge;
  strange.magic[0] ^= 1;
  EXPECT_REASON(MakeClaim(kSecret, 2, 1, strange), kEngineFailed);
}

// More than are let in at once, and enough for a minute if each had a second.
TEST(TcpMeeting, StrangersThatSayNothingKeepNobodyWaiting) {
  const auto meeting = Listen();
  const auto other = Listen();
  const std::vector<std::string> addresses = {AddressOf(meeting->port()), AddressOf(other->port())};
  std::vector<Socket> strangers;
  for (int i = 0; i < 100; ++i) strangers.push_back(Connect(addresses[0]));
  absl::StatusOr<std::unique_ptr<Communicator>> second;
  std::thread thread([&] { second = Meet(*other, 1, addresses); });
  const auto first = Meet(*meeting, 0, addresses);
  thread.join();
  EXPECT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(second.ok()) << second.status();
}

TEST(TcpMeeting, WhoDoesNotKnowTheSecretIsRefusedAndTheRankIsAwaitedStill) {
  const auto meeting = Listen();
  const auto stranger = Listen();
  const auto other = Listen();
  const std::vector<std::string> addresses = {AddressOf(meeting->port()), AddressOf(other->port())};
  absl::StatusOr<std::unique_ptr<Communicator>> first;
  std::thread thread([&] { first = Meet(*meeting, 0, addresses); });
  const auto refused = Meet(*stranger, 1, addresses, kOtherSecret);
  EXPECT_REASON(refused, kEngineFailed);
  EXPECT_THAT(refused.status().message(), HasSubstr("it says that this is none of its ranks"));
  {  // one that is no rank above the called one, whatever it knows
    const Socket socket = Connect(addresses[0]);
    Challenge challenge;
    ASSERT_TRUE(ReceiveAll(socket, &challenge, sizeof(challenge), Patient()).ok());
    const Claim claim = *MakeClaim(kSecret, 2, 0, challenge);
    ASSERT_TRUE(SendAll(socket, &claim, sizeof(claim), Patient()).ok());
    Verdict verdict;
    ASSERT_TRUE(ReceiveAll(socket, &verdict, sizeof(verdict), Patient()).ok());
    EXPECT_EQ(verdict.is_taken, 0);
  }
  const auto second = Meet(*other, 1, addresses);
  thread.join();
  EXPECT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(second.ok()) << second.status();
}

// The answering side learns nothing that it could show to another rank.
TEST(TcpMeeting, TheSecretIsNotTold) {
  int32_t port = 0;
  ASSERT_OK_AND_ASSIGN(const auto listener, ListenAtAnyPort("127.0.0.1", &port));
  const auto meeting = Listen();
  absl::StatusOr<std::unique_ptr<Communicator>> communicator;
  std::thread thread([&] { communicator = Meet(*meeting, 1, {AddressOf(port), ""}); });
  const Socket caller = AwaitCaller(listener);
  const Challenge challenge = *MakeChallenge();
  ASSERT_TRUE(SendAll(caller, &challenge, sizeof(challenge), Patient()).ok());
  Claim claim;
  ASSERT_TRUE(ReceiveAll(caller, &claim, sizeof(claim), Patient()).ok());
  const std::string told(reinterpret_cast<const char*>(&claim), sizeof(claim));
  for (size_t start = 0; start + 4 <= kSecretBytes; ++start) {
    EXPECT_EQ(told.find(std::string(kSecret + start, 4)), std::string::npos) << start;
  }
  const Verdict verdict = {1, claim.proof};
  ASSERT_TRUE(SendAll(caller, &verdict, sizeof(verdict), Patient()).ok());
  thread.join();
  EXPECT_REASON(communicator, kEngineFailed);
  EXPECT_THAT(communicator.status().message(), HasSubstr("does not know the group's secret"));
}

TEST(TcpMeeting, AConnectionThatIsLostIsMadeAgain) {
  int32_t port = 0;
  ASSERT_OK_AND_ASSIGN(const auto listener, ListenAtAnyPort("127.0.0.1", &port));
  const auto meeting = Listen();
  absl::StatusOr<std::unique_ptr<Communicator>> communicator;
  std::thread thread([&] { communicator = Meet(*meeting, 1, {AddressOf(port), ""}); });
  AwaitCaller(listener);  // and hangs up
  const Socket caller = AwaitCaller(listener);
  const Challenge challenge = *MakeChallenge();
  ASSERT_TRUE(SendAll(caller, &challenge, sizeof(challenge), Patient()).ok());
  Claim claim;
  ASSERT_TRUE(ReceiveAll(caller, &claim, sizeof(claim), Patient()).ok());
  ASSERT_TRUE(IsTrue(kSecret, 0, challenge, claim));
  const Verdict verdict = MakeVerdict(kSecret, 0, challenge, claim);
  ASSERT_TRUE(SendAll(caller, &verdict, sizeof(verdict), Patient()).ok());
  thread.join();
  EXPECT_TRUE(communicator.ok()) << communicator.status();
}

TEST(TcpMeeting, CanBeGivenUpWhoeverIsAwaited) {
  int32_t port = 0;
  ASSERT_OK_AND_ASSIGN(const auto silent, ListenAtAnyPort("127.0.0.1", &port));
  for (const int32_t rank : {0, 1}) {
    const auto meeting = Listen();
    int asked = 0;
    const auto communicator = Meet(*meeting, rank, {AddressOf(port), ""}, kSecret, [&] { return ++asked > 2; });
    EXPECT_REASON(communicator, kCancelled);
  }
  const auto meeting = Listen();
  auto late = meeting->Meet(0, {"", ""}, kSecret, std::chrono::milliseconds(100));
  EXPECT_REASON(late, kEngineFailed);
}

// An IPv6-only machine has no 127.0.0.1, a machine without IPv6 no ::1: whatever there is leads to a rank that listens everywhere.
TEST(TcpMeeting, AllAddressesAreThoseOfBothFamilies) {
  for (const std::string host : {"0.0.0.0", "::", "[::]"}) {
    int32_t port = 0, other_port = 0;
    ASSERT_OK_AND_ASSIGN(const auto listener, ListenAtAnyPort(host, &port));
    for (const std::string caller : {"127.0.0.1", "[::1]", ""}) {
      if (caller == "[::1]" && !ListenAtAnyPort("[::1]", &other_port).ok()) continue;  // this machine has no IPv6
      const auto made = ConnectTcp(caller + ":" + std::to_string(port), {Clock::now() + std::chrono::seconds(2), kNever});
      EXPECT_TRUE(made.ok()) << host << " from '" << caller << "': " << made.status();
    }
  }
  int32_t port = 0;
  const auto name = ListenAtAnyPort("localhost", &port);
  ASSERT_FALSE(name.ok());
  EXPECT_THAT(std::string(name.status().message()), HasSubstr("expected an IP address to listen at, got \"localhost\""));
}

}  // namespace
}  // namespace headwater::comm
