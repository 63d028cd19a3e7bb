// A worker joins a server over TLS, with a certificate and a token; who may not is refused, and the server waits on.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "headwater/v1/group_service.grpc.pb.h"
#include "server/group/group_assembly.h"
#include "server/group/ranks/rank_worker.h"
#include "server/service/server.h"
#include "server/service/server_core.h"
#include "tests/integration/support/access_fixture.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/test_certificates.h"
#include "tests/integration/support/wire_server.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

using ::testing::HasSubstr;

// A group of two ranks, of which one is to join.
std::shared_ptr<group::GroupAssembly> MakeGroup() {
  group::AssemblyOptions assembly;
  assembly.engine.shard_count = 2;
  assembly.engine.thread_count = 1;
  assembly.version = service::ServerVersion();
  assembly.listen_host = "127.0.0.1";
  assembly.silence_timeout = absl::Seconds(60);
  auto made = group::GroupAssembly::Create(assembly);
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

class GroupJoin : public ::testing::Test {
 protected:
  GroupJoin() {
    const Credentials client = secured_.client_authority().Issue("worker");
    ReplaceFile(secured_.path("servers.crt"), secured_.server_authority().certificate());
    ReplaceFile(secured_.path("worker.crt"), client.certificate);
    ReplaceFile(secured_.path("worker.key"), client.key);
    for (const char* name : {"worker", "operator", "trainer"}) ReplaceFile(secured_.path(name), TokenText(name) + "\n");
  }

  // Joins to the end of it.
  absl::Status Join(const std::string& token) const {
    const group::LeaderAddress leader = {.address = secured_.address("admin"),
                                         .ca = secured_.path("servers.crt"),
                                         .certificate = secured_.path("worker.crt"),
                                         .key = secured_.path("worker.key"),
                                         .token_file = token.empty() ? "" : secured_.path(token)};
    group::WorkerOptions worker;
    worker.version = service::ServerVersion();
    worker.leader_host = group::LeaderHost(leader.address);
    worker.listen_host = "127.0.0.1";
    return group::JoinLeader(leader, worker);
  }

  SecuredServer secured_{{TokenEntry("worker", R"("admin": ["*"])"), TokenEntry("operator", R"("admin": ["*"])"),
                          TokenEntry("trainer", R"("compute": ["*"])")},
                         MakeGroup(),
                         "worker"};
  service::Server* const server_ = &secured_.server();
};

TEST_F(GroupJoin, OnlyTheWorkersTokenJoinsAndTheServerServesThen) {
  EXPECT_EQ(Join("").code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Join("trainer").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Join("operator").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Join("nothing that is there").code(), absl::StatusCode::kInvalidArgument);
  absl::Status ended;
  std::thread worker([&] { ended = Join("worker"); });
  const absl::Status ready = server_->BecomeReady();  // runs the self-test on both ranks
  EXPECT_TRUE(ready.ok()) << ready;
  EXPECT_EQ(server_->engine().devices().size(), 2u);
  // The self-test's time, of both ranks; the worker tells its own a little later.
  for (const char* rank : {"0", "1"}) {
    const std::string line = std::string("headwater_rank_seconds_total{activity=\"compute\",rank=\"") + rank + "\"} ";
    EXPECT_TRUE(Await([&] {
      const std::string text = server_->SerializeMetrics();
      const size_t at = text.find(line);
      return at != std::string::npos && std::stod(text.substr(at + line.size())) > 0;
    })) << server_->SerializeMetrics();
  }
  EXPECT_EQ(Join("worker").code(), absl::StatusCode::kUnimplemented);  // it has all that it wants
  EXPECT_TRUE(server_->Drain(absl::Seconds(60)));
  EXPECT_TRUE(server_->engine().health().ok());  // that the worker goes with it is no failure
  worker.join();
  EXPECT_FALSE(ended.ok());
}

// What a worker has is every tenant's: it does not keep getting it because it has come in time.
TEST_F(GroupJoin, AWorkerWhoseTokenIsTakenOutIsSentAway) {
  absl::Status ended;
  std::thread worker([&] { ended = Join("worker"); });
  const absl::Status ready = server_->BecomeReady();
  EXPECT_TRUE(ready.ok()) << ready;
  ReplaceFile(secured_.token_path(), TokenFileText({TokenEntry("operator", R"("admin": ["*"])")}));
  worker.join();
  EXPECT_FALSE(ended.ok());
  EXPECT_REASON(server_->engine().health(), kEngineFailed);
  EXPECT_EQ(Join("worker").code(), absl::StatusCode::kUnauthenticated);
}

// Without tokens anybody can call: who says nothing keeps no thread for ever.
TEST(SilentJoin, IsEndedLikeOtherStreams) {
  service::ServerOptions options;
  options.group = MakeGroup();
  options.listen_addresses = {"127.0.0.1:0"};
  options.stream_idle_timeout = absl::Milliseconds(200);
  ASSERT_OK_AND_ASSIGN(const auto server, service::Server::Start(options, options.group->TakeEngine()));
  const auto channel = grpc::CreateChannel(server->addresses().front(), grpc::InsecureChannelCredentials());
  const auto stub = v1::GroupService::NewStub(channel);
  grpc::ClientContext context;
  const grpc::Status ended = EndOf(*stub->Join(&context));
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_THAT(ended.error_message(), HasSubstr("stream_idle_timeout"));
}

}  // namespace
}  // namespace headwater::testing
