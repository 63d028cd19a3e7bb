// The C++ client and headwaterctl with TLS and tokens, against the real server: every path of the rows, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"
#include "tests/integration/support/test_certificates.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using headwater::testing::Credentials;
using headwater::testing::TestAuthority;
using ::testing::HasSubstr;
using ::testing::Not;

const HeadSpec kSpec = {.vocab_size = 32, .hidden_size = 512};
constexpr int64_t kRows = 5000;  // 10 MB: three streams

// By `printf %s secret-trainer | sha256sum`.
constexpr char kTokens[] = R"({"tokens": [{"name": "trainer", "compute": ["*"], "admin": ["*"],
    "sha256": "29f45ea9f7ba6fdc0d9e3f6a87fda60224702a114daddb2f3d7427489429bad7"}]})";

class Access : public ::testing::Test {
 protected:
  Access() {
    Put("ca.crt", authority_.certificate());
    Put("clients.crt", client_authority_.certificate());
    PutPair("server", authority_.Issue("server"));
    PutPair("client", client_authority_.Issue("client"));
    PutPair("expired", client_authority_.Issue("client", /*expired=*/true));
    Put("tokens.json", kTokens);
    Put("trainer.token", "secret-trainer\n");
  }

  std::string Path(const std::string& name) const { return directory_.path() + "/" + name; }
  void Put(const std::string& name, const std::string& text) const { headwater::testing::ReplaceFile(Path(name), text); }
  void PutPair(const std::string& name, const Credentials& pair) const {
    Put(name + ".crt", pair.certificate);
    Put(name + ".key", pair.key);
  }
  // The server's, with client certificates; later addresses win over the Unix socket that the process starts with.
  std::vector<std::string> SecureFlags() const {
    return {"--listen_addresses=127.0.0.1:0",         "--tls_certificate=" + Path("server.crt"), "--tls_key=" + Path("server.key"),
            "--tls_client_ca=" + Path("clients.crt"), "--token_file=" + Path("tokens.json"),     "--log_level=debug"};
  }
  ClientOptions SecureOptions(const std::string& token = "secret-trainer") const {
    return {.transport = Transport::kGrpc,
            .tls = TlsOptions{Path("ca.crt"), Path("client.crt"), Path("client.key"), ""},
            .token = token};
  }

  TemporaryDirectory directory_;
  const TestAuthority authority_{"servers"};
  const TestAuthority client_authority_{"clients"};
};

LossResult Compute(Head& head) { return Value(SubmitRandom(head, kRows, {})); }

TEST_F(Access, EveryConnectionOfAMicroBatchHasTlsAndTheToken) {
  const ServerProcess server(SecureFlags());
  Client client = Value(Client::Connect(server.address(), SecureOptions()));
  Head head = CreateHead(client, "h", kSpec);
  const LossResult striped = Compute(head);
  EXPECT_EQ(striped.transport, "grpc");
  EXPECT_EQ(client.stats().stripes, 3);
  ClientOptions one_stream = SecureOptions();
  one_stream.stripes = 1;
  Client other = Value(Client::Connect(server.address(), one_stream));
  Head same = Value(other.OpenHead("h"));
  EXPECT_EQ(Compute(same).loss_sum, striped.loss_sum);
  EXPECT_EQ(Value(client.CheckHealth()), HealthStatus::kServing);
  EXPECT_EQ(Value(client.ListHeads()).size(), 1u);
  EXPECT_THAT(server.log(), HasSubstr("trainer"));       // the token's name
  EXPECT_THAT(server.log(), Not(HasSubstr("secret-")));  // not the token
  EXPECT_THAT(server.log(), Not(HasSubstr("unprotected")));
}

TEST_F(Access, TokensGoOverUnixSocketsAndSharedMemory) {
  const ServerProcess server({"--token_file=" + Path("tokens.json")}, /*shares_memory=*/true);
  ClientOptions options = {.token = "secret-trainer"};
  for (const Transport transport : {Transport::kGrpc, Transport::kSharedMemory}) {
    options.transport = transport;
    Client client = server.Connect(options);
    Head head = Value(client.AttachHead("h", kSpec));  // the second time it is there
    Value(
        head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(RandomFloats(1, kSpec.vocab_size * kSpec.hidden_size, 0.1F))));
    EXPECT_EQ(Compute(head).transport, transport == Transport::kGrpc ? "grpc" : "shared_memory");
    EXPECT_EQ(client.stats().stripes, transport == Transport::kGrpc ? 3 : 0);
  }
}

TEST_F(Access, ConnectTellsWhyTheHandshakeFails) {
  const ServerProcess server(SecureFlags());
  const auto error_of = [](const std::string& target, ClientOptions options) {
    options.connect_timeout = std::chrono::seconds(4);
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status = Client::Connect(target, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(3500));  // not all of it: it will not get better
    return std::string(status.message());
  };
  ClientOptions options = SecureOptions();
  options.tls->ca_certificate = Path("clients.crt");
  EXPECT_THAT(error_of(server.address(), options), HasSubstr("issuer certificate"));
  options = SecureOptions();
  options.tls->server_name = "another.example";
  EXPECT_THAT(error_of(server.address(), options), HasSubstr("mismatch"));
  PutPair("server", authority_.Issue("server", /*expired=*/true));
  const ServerProcess expired(SecureFlags());
  EXPECT_THAT(error_of(expired.address(), SecureOptions()), HasSubstr("certificate has expired"));
  const ServerProcess plain({"--listen_addresses=127.0.0.1:0"});
  options = SecureOptions();
  options.token.clear();
  EXPECT_THAT(error_of(plain.address(), options), HasSubstr("wrong version number"));
  // gRPC's own lines are not among those of the program.
  const ProgramResult ctl = RunProgram(
      {HEADWATERCTL, "--server=" + expired.address(), "--ca_certificate=" + Path("ca.crt"), "--connect_timeout=4s", "info"});
  EXPECT_EQ(ctl.exit_code, 1);
  EXPECT_THAT(ctl.err, HasSubstr("certificate has expired"));
  EXPECT_EQ(std::count(ctl.err.begin(), ctl.err.end(), '\n'), 2) << ctl.err;  // the error and its hint
}

TEST_F(Access, ASocketsPathStandsForItself) {
  const std::string address = "unix:" + Path("a%20b c?d#e");
  const ServerProcess server({"--listen_addresses=" + address});
  ClientOptions options = {.transport = Transport::kGrpc};
  Client client = Value(Client::Connect(address, options));
  Head head = CreateHead(client, "h", kSpec);
  EXPECT_EQ(Compute(head).transport, "grpc");
  EXPECT_EQ(client.stats().stripes, 3);
}

std::string ConnectError(const std::string& target, const ClientOptions& options) {
  const absl::Status status = Client::Connect(target, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST_F(Access, OptionsThatWouldGiveAwayATokenAreRefusedBeforeAnythingIsSent) {
  ClientOptions options = {.token = "secret-trainer"};
  for (const std::string target :
       {"10.1.2.3:1", "server.example:1", "dns:///server.example:1", "127.evil.example:1", "[2001:db8::1]:1"}) {
    EXPECT_THAT(ConnectError(target, options), HasSubstr("plaintext_token")) << target;
  }
  options.allow_plaintext_token = true;
  options.connect_timeout = std::chrono::milliseconds(1);
  EXPECT_EQ(Client::Connect("127.0.0.1:1", options).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Client::Connect("[2001:db8::1]:1", options).status().code(), absl::StatusCode::kUnavailable);
  options.token = "secret with blanks";
  EXPECT_THAT(ConnectError("127.0.0.1:1", options), Not(HasSubstr("secret")));
  options = SecureOptions();
  EXPECT_THAT(ConnectError("unix:/tmp/socket", options), HasSubstr("Unix"));
  options.tls->client_key.clear();
  EXPECT_THAT(ConnectError("127.0.0.1:1", options), HasSubstr("neither"));
  options = SecureOptions();
  options.tls->ca_certificate = Path("no-such-file");
  EXPECT_THAT(ConnectError("127.0.0.1:1", options), HasSubstr("ca_certificate"));
  options = SecureOptions();
  options.tls->client_key = Path("expired.key");
  EXPECT_THAT(ConnectError("127.0.0.1:1", options), HasSubstr("tls.client_key"));
}

TEST_F(Access, AClientTakesUpNewFiles) {
  ServerProcess server(SecureFlags());
  Client client = Value(Client::Connect(server.address(), SecureOptions()));
  Head head = CreateHead(client, "h", kSpec);
  const TestAuthority servers("new servers");
  const TestAuthority clients("new clients");
  PutPair("server", servers.Issue("server"));
  Put("clients.crt", clients.certificate());
  Put("ca.crt", servers.certificate());
  PutPair("client", clients.Issue("client"));
  // The connections for rows are made now, until server and client have both seen the new files.
  ClientOptions fresh = SecureOptions();
  fresh.connect_timeout = std::chrono::seconds(5);
  EXPECT_TRUE(Await([&] {
    absl::StatusOr<Client> again = Client::Connect(server.address(), fresh);
    return again.ok() && again->OpenHead("h").ok();
  }));
  EXPECT_EQ(Compute(head).transport, "grpc");
}

TEST_F(Access, HeadwaterctlTakesFilesFromFlagsAndTheEnvironment) {
  const ServerProcess server(SecureFlags());
  const auto run = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {HEADWATERCTL, "--server=" + server.address()});
    arguments.push_back("info");
    return RunProgram(arguments);
  };
  std::vector<std::string> flags = {"--ca_certificate=" + Path("ca.crt"), "--client_certificate=" + Path("client.crt"),
                                    "--client_key=" + Path("client.key")};
  const ProgramResult refused = run(flags);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, HasSubstr("UNAUTHENTICATED"));
  flags.push_back("--token_file=" + Path("trainer.token"));
  const ProgramResult accepted = run(flags);
  EXPECT_EQ(accepted.exit_code, 0) << accepted.err;
  {
    const EnvironmentVariable ca("HEADWATER_CA_CERTIFICATE", Path("ca.crt"));
    const EnvironmentVariable certificate("HEADWATER_CLIENT_CERTIFICATE", Path("client.crt"));
    const EnvironmentVariable key("HEADWATER_CLIENT_KEY", Path("client.key"));
    const EnvironmentVariable token("HEADWATER_TOKEN_FILE", Path("trainer.token"));
    const ProgramResult from_environment = run({});
    EXPECT_EQ(from_environment.exit_code, 0) << from_environment.err;
  }
  flags.back() = "--token_file=" + Path("no-such-file");
  EXPECT_THAT(run(flags).err, HasSubstr("--token_file"));
}

}  // namespace
}  // namespace headwater::e2e
