// A worker joins a server over TLS, with a certificate and a token; who may not is refused, and the server waits on.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "headwater/kernels/error.h"
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

class GroupJoin : public ::testing::Test {
 protected:
  GroupJoin() {
    std::string pattern = (std::filesystem::temp_directory_path() / "headwater-test-XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    const Credentials server = servers_.Issue("server");
    const Credentials client = clients_.Issue("worker");
    WriteFile(Path("server.crt"), server.certificate);
    WriteFile(Path("server.key"), server.key);
    WriteFile(Path("clients.crt"), clients_.certificate());
    WriteFile(Path("servers.crt"), servers_.certificate());
    WriteFile(Path("worker.crt"), client.certificate);
    WriteFile(Path("worker.key"), client.key);
    WriteFile(Path("tokens.json"),
              TokenFileText({TokenEntry("worker", R"("admin": ["*"])"), TokenEntry("operator", R"("admin": ["*"])"),
                             TokenEntry("trainer", R"("compute": ["*"])")}));
    for (const char* name : {"worker", "operator", "trainer"}) WriteFile(Path(name), TokenText(name) + "\n");

    group::AssemblyOptions assembly;
    assembly.engine.shard_count = 2;
    assembly.engine.thread_count = 1;
    assembly.version = service::ServerVersion();
    assembly.listen_host = "127.0.0.1";
    assembly.silence_timeout = absl::Seconds(60);
    auto made = group::GroupAssembly::Create(assembly);
    EXPECT_TRUE(made.ok()) << made.status();
    service::ServerOptions options;
    group_ = *std::move(made);
    options.group = group_;
    options.worker_token = "worker";
    options.listen_addresses = {"127.0.0.1:0"};
    options.tls_certificate = Path("server.crt");
    options.tls_key = Path("server.key");
    options.tls_client_ca = Path("clients.crt");
    options.token_file = Path("tokens.json");
    auto started = service::Server::Start(options, options.group->TakeEngine());
    EXPECT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }
  ~GroupJoin() override {
    server_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }

  // Joins to the end of it.
  absl::Status Join(const std::string& token) const {
    const group::LeaderAddress leader = {.address = server_->addresses().front(),
                                         .ca = Path("servers.crt"),
                                         .certificate = Path("worker.crt"),
                                         .key = Path("worker.key"),
                                         .token_file = token.empty() ? "" : Path(token)};
    group::WorkerOptions worker;
    worker.version = service::ServerVersion();
    worker.leader_host = group::LeaderHost(leader.address);
    worker.listen_host = "127.0.0.1";
    return group::JoinLeader(leader, worker);
  }

  const TestAuthority servers_{"servers"};
  const TestAuthority clients_{"clients"};
  std::string directory_;
  std::shared_ptr<group::GroupAssembly> group_;
  std::unique_ptr<service::Server> server_;
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
  WriteFile(Path("tokens.json"), TokenFileText({TokenEntry("operator", R"("admin": ["*"])")}));
  worker.join();
  EXPECT_FALSE(ended.ok());
  EXPECT_REASON(server_->engine().health(), kEngineFailed);
  EXPECT_EQ(Join("worker").code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(GroupJoin, AServerWhoseWorkersDoNotComeCanBeGivenUp) {
  group_->GiveUp();
  EXPECT_TRUE(HasReason(server_->BecomeReady(), ErrorReason::kCancelled));
}

// Without tokens anybody can call: who says nothing keeps no thread for ever.
TEST(SilentJoin, IsEndedLikeOtherStreams) {
  group::AssemblyOptions assembly;
  assembly.engine.shard_count = 2;
  assembly.engine.thread_count = 1;
  assembly.version = service::ServerVersion();
  assembly.listen_host = "127.0.0.1";
  ASSERT_OK_AND_ASSIGN(auto made, group::GroupAssembly::Create(assembly));
  service::ServerOptions options;
  options.group = std::move(made);
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
