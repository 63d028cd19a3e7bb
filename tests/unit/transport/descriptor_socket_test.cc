#include "server/transport/descriptor_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/server/temporary_directory.h"
#include "tests/unit/transport/descriptor_peer.h"
#include "tests/unit/transport/region_memory.h"

namespace headwater::transport {
namespace {

using ::headwater::testing::ConnectTo;
using ::headwater::testing::DescriptorAnswer;
using ::headwater::testing::DescriptorRequest;
using ::headwater::testing::kAllSeals;
using ::headwater::testing::MakeMemory;
using ::headwater::testing::OpenDescriptors;
using ::headwater::testing::ReadDescriptorAnswer;
using ::headwater::testing::SendDescriptors;
using ::headwater::testing::TemporaryDirectory;
using ::testing::EndsWith;
using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;

class Sockets : public ::testing::Test {
 protected:
  Sockets() {
    options_.path = folder_ + "/memory.sock";
    options_.incarnation.fill('i');
  }
  void Listen() {
    ASSERT_OK_AND_ASSIGN(auto socket, DescriptorSocket::Listen(options_));
    socket_ = std::move(socket);
  }
  // One connection, packet and answer.
  DescriptorAnswer Call(const std::string& packet, const std::vector<int>& descriptors) {
    const FileDescriptor connection = ConnectTo(socket_->path());
    EXPECT_TRUE(connection.valid());
    EXPECT_TRUE(SendDescriptors(connection.get(), packet, descriptors));
    return ReadDescriptorAnswer(connection.get());
  }
  DescriptorAnswer Pass(int64_t bytes = kPage) {
    const FileDescriptor memory(MakeMemory(bytes));
    return Call(DescriptorRequest(static_cast<uint64_t>(bytes)), {memory.get()});
  }
  // Until the socket's thread has closed what it had.
  void AwaitDescriptors(int count) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (OpenDescriptors() != count && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(OpenDescriptors(), count);
  }

  const TemporaryDirectory directory_;
  const std::string& folder_ = directory_.path();
  DescriptorSocketOptions options_;
  std::unique_ptr<DescriptorSocket> socket_;
};

TEST_F(Sockets, AnswersATokenThatIsGoodOnce) {
  Listen();
  const FileDescriptor memory(MakeMemory(3 * kPage));
  const DescriptorAnswer answer = Call(DescriptorRequest(3 * kPage), {memory.get()});
  ASSERT_EQ(answer.code, 0u) << answer.message;
  EXPECT_EQ(answer.incarnation, std::string(16, 'i'));
  EXPECT_EQ(socket_->size(), 1);
  ASSERT_OK_AND_ASSIGN(auto taken, socket_->Take(answer.token));
  struct stat passed {};
  struct stat mine {};
  ASSERT_EQ(fstat(taken.get(), &passed), 0);
  ASSERT_EQ(fstat(memory.get(), &mine), 0);
  EXPECT_EQ(passed.st_ino, mine.st_ino);
  EXPECT_NE(fcntl(taken.get(), F_GETFD) & FD_CLOEXEC, 0);
  const absl::Status again = socket_->Take(answer.token).status();
  EXPECT_REASON(again, kInvalidField);
  EXPECT_EQ(again, socket_->Take(std::string(32, 'x')).status());
  EXPECT_EQ(again, socket_->Take("").status());
  EXPECT_EQ(socket_->size(), 0);
}

TEST_F(Sockets, TokensAreNeverTheSame) {
  Listen();
  std::set<std::string> tokens;
  for (int i = 0; i < 20; ++i) {
    const DescriptorAnswer answer = Pass();
    EXPECT_TRUE(socket_->Take(answer.token).ok());
    EXPECT_TRUE(tokens.insert(answer.token).second);
  }
}

// tests/fuzz/targets/descriptor_message.cc has wrong packets.
TEST_F(Sockets, RefusesWhatIsNoSealedMemory) {
  Listen();
  const int before = OpenDescriptors();
  {
    const FileDescriptor memory(MakeMemory(kPage));
    const FileDescriptor open(MakeMemory(kPage, kAllSeals & ~F_SEAL_SHRINK));
    const FileDescriptor sparse(MakeMemory(4 * kPage, kAllSeals, /*sparse=*/true));
    const FileDescriptor program(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    const std::string request = DescriptorRequest(kPage);
    EXPECT_EQ(Call(request, std::vector<int>(20, memory.get())).code, 3u);  // more than are looked at
    EXPECT_THAT(Call(DescriptorRequest(4 * kPage), {sparse.get()}).message, HasSubstr("allocated in full"));
    EXPECT_THAT(Call(request, {open.get()}).message, HasSubstr("without F_SEAL_SHRINK"));
    EXPECT_EQ(Call(request, {program.get()}).code, 3u);
    EXPECT_EQ(Call(DescriptorRequest(~uint64_t{0}), {memory.get()}).code, 3u);
    EXPECT_THAT(Call(DescriptorRequest(kPage, "HWMD", 2), {memory.get()}).message, HasSubstr("version 1"));
    for (const std::string& message : {Call(request, {program.get()}).message, Call(request, {open.get()}).message}) {
      EXPECT_THAT(message, ::testing::Not(HasSubstr(folder_)));
      EXPECT_LE(message.size(), 256u);
    }
  }
  EXPECT_EQ(socket_->size(), 0);
  AwaitDescriptors(before);
  EXPECT_EQ(Pass().code, 0u);  // and goes on
}

TEST_F(Sockets, ForgetsTokensThatNobodyUses) {
  options_.token_lifetime = absl::Milliseconds(20);
  Listen();
  const int before = OpenDescriptors();
  const DescriptorAnswer answer = Pass();
  ASSERT_EQ(answer.code, 0u);
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (socket_->size() > 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(socket_->size(), 0);
  EXPECT_FALSE(socket_->Take(answer.token).ok());
  AwaitDescriptors(before);
}

TEST_F(Sockets, KeepsABoundedNumber) {
  options_.max_tokens = 3;
  options_.max_user_tokens = 2;
  Listen();
  const int before = OpenDescriptors();
  const DescriptorAnswer first = Pass();
  EXPECT_EQ(Pass().code, 0u);
  const DescriptorAnswer refused = Pass();
  EXPECT_EQ(refused.code, 8u);  // RESOURCE_EXHAUSTED
  EXPECT_EQ(
      refused.message,
      "descriptor: expected at most 2 of one user that wait to be registered (user_descriptors), got 3; register them, or wait");
  AwaitDescriptors(before + 2);
  EXPECT_TRUE(socket_->Take(first.token).ok());
  EXPECT_EQ(Pass().code, 0u);
}

TEST_F(Sockets, KeepsABoundedNumberOfAllUsers) {
  options_.max_tokens = 1;
  Listen();
  EXPECT_EQ(Pass().code, 0u);
  const DescriptorAnswer refused = Pass();
  EXPECT_EQ(refused.code, 8u);
  EXPECT_THAT(refused.message, HasSubstr("at most 1 of all users that wait to be registered (descriptors), got 2"));
}

TEST_F(Sockets, ConnectionsThatSayNothingDoNotKeepOthersOut) {
  options_.max_connections = 2;
  options_.request_timeout = absl::Milliseconds(500);  // counts for those that do say something too
  Listen();
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 2; ++i) silent.push_back(ConnectTo(socket_->path()));
  EXPECT_EQ(Pass().code, 0u);
  EXPECT_FALSE(ReadDescriptorAnswer(silent[0].get()).came);  // closed
}

TEST_F(Sockets, AClientThatGoesAtOnceLeavesNothing) {
  Listen();
  const int before = OpenDescriptors();
  for (int i = 0; i < 20; ++i) ConnectTo(socket_->path());
  for (int i = 0; i < 20; ++i) {
    const FileDescriptor connection = ConnectTo(socket_->path());
    const FileDescriptor memory(MakeMemory(kPage, 0, false, MFD_CLOEXEC));
    EXPECT_TRUE(SendDescriptors(connection.get(), DescriptorRequest(kPage), {memory.get()}));
  }
  EXPECT_EQ(Pass().code, 0u);
  AwaitDescriptors(before + 1);  // the one that waits
}

TEST_F(Sockets, TakesOnlyItsOwnUserUnlessToldOtherwise) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  options_.mode = 0666;
  // 0: a token; 10: refused, and says so; another: what went wrong.
  const auto as_nobody = [&] {
    const pid_t child = fork();
    if (child == 0) {
      if (setgid(65534) != 0 || setuid(65534) != 0) _exit(20);
      const FileDescriptor connection = ConnectTo(socket_->path());
      if (!connection.valid()) _exit(21);
      const FileDescriptor memory(MakeMemory(kPage));
      if (!SendDescriptors(connection.get(), DescriptorRequest(kPage), {memory.get()})) _exit(22);
      const DescriptorAnswer answer = ReadDescriptorAnswer(connection.get());
      if (!answer.came) _exit(23);
      _exit(answer.code == 0 ? 0 : answer.code == 7 ? 10 : 24);  // PERMISSION_DENIED
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
  };
  Listen();
  EXPECT_EQ(as_nobody(), 10);
  EXPECT_EQ(socket_->size(), 0);
  socket_.reset();
  options_.any_user = true;
  Listen();
  EXPECT_EQ(as_nobody(), 0);
  socket_.reset();
  options_.mode = 0600;
  Listen();
  EXPECT_EQ(as_nobody(), 21);  // the file's permissions
}

TEST_F(Sockets, TakesThePlaceOfADeadServerAndOfNothingElse) {
  const mode_t mask = umask(0);
  Listen();
  umask(mask);
  struct stat status {};
  ASSERT_EQ(stat(options_.path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  const auto second = DescriptorSocket::Listen(options_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Pass().code, 0u);  // the first one is as it was
  socket_.reset();
  EXPECT_NE(stat(options_.path.c_str(), &status), 0);

  {
    const FileDescriptor dead(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, options_.path.c_str(), options_.path.size() + 1);
    ASSERT_EQ(bind(dead.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  Listen();
  EXPECT_EQ(Pass().code, 0u);
  socket_.reset();

  std::ofstream(options_.path) << "a file\n";
  EXPECT_EQ(DescriptorSocket::Listen(options_).status().code(), absl::StatusCode::kUnavailable);
  ASSERT_EQ(stat(options_.path.c_str(), &status), 0);
  EXPECT_TRUE(S_ISREG(status.st_mode));
}

TEST_F(Sockets, RefusesOptionsThatMeanNothing) {
  DescriptorSocketOptions options = options_;
  options.path = "";
  EXPECT_EQ(DescriptorSocket::Listen(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.path = folder_ + "/" + std::string(120, 'n');
  EXPECT_EQ(DescriptorSocket::Listen(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = options_;
  options.mode = 01000;
  EXPECT_EQ(DescriptorSocket::Listen(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = options_;
  options.path = folder_ + "/none/memory.sock";
  EXPECT_EQ(DescriptorSocket::Listen(options).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace headwater::transport
