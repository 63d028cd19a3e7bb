// Who may do what: the access table over every RPC that there is, on every port; tenants and patterns; files that change.
#include "server/service/access/access.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "headwater/v1/group_service.pb.h"
#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"
#include "tests/integration/support/access_fixture.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/raw_call.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using grpc::StatusCode;
using service::Permission;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<std::string> kTokens = {
    TokenEntry("nothing", ""),
    TokenEntry("computes", R"("compute": ["*"])"),
    TokenEntry("administers", R"("admin": ["*"])"),
    TokenEntry("all", R"("compute": ["*"], "admin": ["*"])"),
    TokenEntry("some", R"("compute": ["student-*"], "admin": ["student-1"])"),
    TokenEntry("team", R"("tenant": "team", "compute": ["*"], "admin": ["*"])"),
};

// Calls a method of any kind with one empty message, and with these values of "authorization".
grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& path,
                       const std::vector<std::string>& authorization) {
  return CallRaw(channel, path, {""}, {.authorization = authorization, .on_answer = [](const std::string&) { return false; }})
      .status;
}

// The RPCs of a service, from its descriptor; those of services whose descriptors gRPC does not bring along, by hand.
std::vector<std::string> MethodsOf(const std::string& service) {
  if (service == "grpc.health.v1.Health") return {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"};
  const auto* const descriptor = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service);
  EXPECT_NE(descriptor, nullptr) << service << ": without a descriptor its RPCs are not known to this test";
  std::vector<std::string> methods;
  for (int i = 0; descriptor != nullptr && i < descriptor->method_count(); ++i) {
    methods.push_back(absl::StrCat("/", service, "/", descriptor->method(i)->name()));
  }
  return methods;
}

// Every service of the files of the API, and what gRPC adds.
std::set<std::string> AllServices() {
  std::set<std::string> services = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"};
  for (const auto* const file : {v1::Head::descriptor()->file(), v1::MicroBatchHeader::descriptor()->file(),
                                 v1::ServerInfo::descriptor()->file(), v1::RankHello::descriptor()->file()}) {
    for (int i = 0; i < file->service_count(); ++i) services.insert(file->service(i)->full_name());
  }
  return services;
}

std::vector<std::string> AllMethods() {
  std::vector<std::string> methods;
  for (const std::string& service : AllServices()) {
    for (const std::string& method : MethodsOf(service)) methods.push_back(method);
  }
  return methods;
}

// What a server itself says that it serves: the names in the answer, each behind a byte that is no letter.
std::set<std::string> ServicesOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& token) {
  const RawReply reply =
      CallRaw(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", {"\x3a\x01*"},  // list_services
              {.authorization = Bearer(token)});
  EXPECT_TRUE(reply.status.ok()) << reply.status.error_message();
  static const std::regex name("(headwater|grpc)[.][A-Za-z0-9.]+");
  return {std::sregex_token_iterator(reply.answer.begin(), reply.answer.end(), name), std::sregex_token_iterator()};
}

bool IsRefusal(const grpc::Status& status) {
  return status.error_code() == StatusCode::UNAUTHENTICATED || status.error_code() == StatusCode::PERMISSION_DENIED;
}

TEST(AccessTable, HasARowForEveryRpcAndNoOther) {
  const std::vector<std::string> methods = AllMethods();
  for (const std::string& method : methods) EXPECT_NE(service::FindAccessRow(method), nullptr) << method << " has no row";
  std::set<std::string> seen;
  for (const service::AccessRow& row : service::AccessTable()) {
    EXPECT_TRUE(seen.insert(row.path).second) << row.path << " has two rows";
    if (absl::StartsWith(row.path, "/grpc.reflection.v1.")) continue;
    EXPECT_THAT(methods, Contains(row.path));
  }
  for (size_t i = 0; i < static_cast<size_t>(observability::RpcMethod::kCount); ++i) {
    const auto method = static_cast<observability::RpcMethod>(i);
    const service::AccessRow* const row = service::FindAccessRow(method);
    ASSERT_NE(row, nullptr) << observability::RpcMethodName(method);
    EXPECT_TRUE(absl::EndsWith(row->path, absl::StrCat("/", observability::RpcMethodName(method)))) << row->path;
  }
}

TEST(AccessTable, IsEnforcedForEveryRpcOnEveryPort) {
  SecuredServer server(kTokens);
  const std::vector<std::string> methods = AllMethods();
  // Nothing is served that this test does not know.
  std::set<std::string> served = ServicesOf(server.Connect("data"), TokenText("nothing"));
  served.insert("grpc.health.v1.Health");  // which reflection leaves out
  EXPECT_EQ(served, AllServices());
  int tried = 0;
  for (const auto& [port, address] : server.addresses()) {
    const std::shared_ptr<grpc::Channel> channel = server.Connect(port);
    const bool takes_admin = absl::StartsWith(port, "admin");
    for (const std::string& method : methods) {
      SCOPED_TRACE(absl::StrCat(method, " on ", port));
      const Permission needs = service::FindAccessRow(method)->needs;
      const auto code = [&](const std::vector<std::string>& authorization) {
        ++tried;
        return CallEmpty(channel, method, authorization).error_code();
      };
      if (needs == Permission::kNone) {
        EXPECT_FALSE(IsRefusal(CallEmpty(channel, method, {})));
        continue;
      }
      EXPECT_EQ(code({}), StatusCode::UNAUTHENTICATED);
      EXPECT_EQ(code(Bearer("wrong")), StatusCode::UNAUTHENTICATED);
      EXPECT_EQ(code({"Bearer"}), StatusCode::UNAUTHENTICATED);
      EXPECT_EQ(code({"Basic " + TokenText("all")}), StatusCode::UNAUTHENTICATED);
      EXPECT_EQ(code({"Bearer wrong", "Bearer " + TokenText("all")}), StatusCode::UNAUTHENTICATED);
      const bool upload = absl::EndsWith(method, "/UploadWeights");  // either permission, by what its header says
      const bool admin = needs == Permission::kAdmin;
      const auto expect = [&](const std::string& token, bool allowed) {
        const grpc::Status status = CallEmpty(channel, method, Bearer(TokenText(token)));
        ++tried;
        if (allowed) {
          EXPECT_FALSE(IsRefusal(status)) << token << ": " << status.error_message();
        } else {
          EXPECT_EQ(status.error_code(), StatusCode::PERMISSION_DENIED) << token;
        }
      };
      expect("nothing", needs == Permission::kToken);
      expect("computes", !admin);
      expect("administers", needs != Permission::kCompute && (!admin || takes_admin) ? true : upload);
      expect("all", !admin || takes_admin);
    }
  }
  EXPECT_GT(tried, 4 * 25 * 9);
}

TEST(AccessTable, NobodyGetsInWithoutACertificateThatIsGood) {
  SecuredServer server(kTokens);
  const TestAuthority stranger("strangers");
  for (const std::string port : {"data", "admin"}) {
    for (const std::string& method : AllMethods()) {
      SCOPED_TRACE(absl::StrCat(method, " on ", port));
      const std::vector<std::string> token = Bearer(TokenText("all"));
      const Credentials expired = server.client_authority().Issue("client", /*expired=*/true);
      EXPECT_EQ(CallEmpty(server.Connect(port, expired), method, token).error_code(), StatusCode::UNAVAILABLE);
      EXPECT_EQ(CallEmpty(server.Connect(port, stranger.Issue("client")), method, token).error_code(), StatusCode::UNAVAILABLE);
      EXPECT_EQ(CallEmpty(server.Connect(port, Credentials()), method, token).error_code(), StatusCode::UNAVAILABLE);
    }
    const auto plain = grpc::CreateChannel(server.address(port), grpc::InsecureChannelCredentials());
    EXPECT_EQ(CallEmpty(plain, "/grpc.health.v1.Health/Check", {}).error_code(), StatusCode::UNAVAILABLE);
  }
}

// Calls with a token: their status.
struct Actor {
  std::shared_ptr<grpc::Channel> channel;
  std::string token;

  // A call of any kind whose only message is `request`.
  grpc::Status Call(const std::string& method, const google::protobuf::Message& request,
                    google::protobuf::Message* response = nullptr) const {
    const RawReply reply =
        CallRaw(channel, "/headwater.v1." + method, {request.SerializeAsString()}, {.authorization = Bearer(TokenText(token))});
    if (response != nullptr) {
      EXPECT_TRUE(response->ParseFromString(reply.answer));
    }
    return reply.status;
  }
  template <typename Request>
  grpc::Status CallOn(const std::string& rpc, const std::string& name, google::protobuf::Message* response = nullptr) const {
    Request request;
    request.set_name(name);
    return Call("HeadService/" + rpc, request, response);
  }
  grpc::Status Create(const std::string& name) const {
    v1::CreateHeadRequest request;
    request.set_name(name);
    *request.mutable_spec() = SmallSpec();
    return Call("HeadService/CreateHead", request);
  }
  grpc::Status Get(const std::string& name, v1::Head* head = nullptr) const {
    return CallOn<v1::GetHeadRequest>("GetHead", name, head);
  }
  grpc::Status Take(const std::string& name) const { return CallOn<v1::TakeHeadRequest>("TakeHead", name); }
  grpc::Status Delete(const std::string& name) const { return CallOn<v1::DeleteHeadRequest>("DeleteHead", name); }
  // The heads of the token's tenant.
  std::vector<std::string> List(int page_size = 0) const {
    std::vector<std::string> names;
    v1::ListHeadsRequest request;
    request.set_page_size(page_size);
    do {
      v1::ListHeadsResponse response;
      const grpc::Status status = Call("HeadService/ListHeads", request, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      for (const v1::Head& head : response.heads()) names.push_back(head.name());
      request.set_page_token(response.next_page_token());
    } while (!request.page_token().empty());
    return names;
  }
  // Opens an upload of a head's weight and ends it: what the header was answered.
  grpc::Status Upload(const v1::Head& head, bool closes_step) const {
    v1::UploadWeightsRequest request;
    *request.mutable_header() = UploadHeader(head, "u");
    if (closes_step) request.mutable_header()->set_closes_step(0);
    return Call("HeadService/UploadWeights", request);
  }
  grpc::Status Compute(const v1::MicroBatchHeader& micro_batch) const {
    v1::ComputeLossRequest request;
    *request.mutable_header() = micro_batch;
    return Call("LossService/ComputeLoss", request);
  }
  grpc::Status StreamTeacher(const std::string& tenant) const {
    v1::StreamTeacherRequest request;
    *request.mutable_header() = TeacherHeader("key", 1, 4);
    request.mutable_header()->set_tenant(tenant);
    return Call("LossService/StreamTeacher", request);
  }
};

TEST(Tenants, AreAsIfTheOthersWereNotThere) {
  SecuredServer server(kTokens);
  const std::shared_ptr<grpc::Channel> channel = server.Connect("admin");
  const Actor ours{channel, "all"};
  const Actor theirs{channel, "team"};
  ASSERT_EQ(ReasonOf(ours.Create("tenants/default/heads/ours")), "OK");
  ASSERT_EQ(ReasonOf(theirs.Create("tenants/team/heads/theirs")), "OK");
  // Word for word what there is to say of a head that is not there.
  for (const std::string name : {"tenants/default/heads/ours", "tenants/team/heads/ours"}) {
    EXPECT_EQ(ExpectError(theirs.Get(name), "HEAD_NOT_FOUND").message, "there is no head " + name);
  }
  EXPECT_EQ(ReasonOf(theirs.Take("tenants/default/heads/ours")), "HEAD_NOT_FOUND");
  EXPECT_EQ(ReasonOf(theirs.Delete("tenants/default/heads/ours")), "HEAD_NOT_FOUND");
  EXPECT_EQ(ReasonOf(theirs.Create("tenants/default/heads/ours")), "PERMISSION_DENIED");
  EXPECT_EQ(ReasonOf(theirs.Create("tenants/default/heads/other")), "PERMISSION_DENIED");
  TestHead head;
  ASSERT_EQ(ReasonOf(ours.Get("tenants/default/heads/ours", &head.head)), "OK");
  EXPECT_EQ(ReasonOf(theirs.Compute(CrossEntropyHeader(head, 0, 0, {1}))), "HEAD_NOT_FOUND");
  EXPECT_EQ(ReasonOf(ours.Compute(CrossEntropyHeader(head, 0, 0, {1}))), "WEIGHTS_NOT_LOADED");
  EXPECT_EQ(ReasonOf(theirs.StreamTeacher("tenants/default")), "PERMISSION_DENIED");
  EXPECT_EQ(ReasonOf(theirs.StreamTeacher("tenants/team")), "PROTOCOL_VIOLATION");  // its rows are missing
  v1::ListHeadsRequest list;
  list.set_parent("tenants/default");
  EXPECT_THAT(ExpectError(theirs.Call("HeadService/ListHeads", list), "PERMISSION_DENIED").message,
              HasSubstr("expected the token's tenant, tenants/team, got another"));
  EXPECT_EQ(theirs.List(), std::vector<std::string>{"tenants/team/heads/theirs"});
  EXPECT_EQ(ours.List(), std::vector<std::string>{"tenants/default/heads/ours"});
}

TEST(Patterns, SayWhichHeadsATokenIsFor) {
  SecuredServer server(kTokens);
  const std::shared_ptr<grpc::Channel> channel = server.Connect("admin_unix");
  const Actor owner{channel, "all"};
  const Actor some{channel, "some"};
  const std::string prefix = "tenants/default/heads/";
  for (const std::string id : {"a", "student-1", "student-2", "teacher"}) ASSERT_EQ(ReasonOf(owner.Create(prefix + id)), "OK");
  EXPECT_EQ(ReasonOf(some.Get(prefix + "student-2")), "OK");
  EXPECT_NE(ReasonOf(some.Take(prefix + "student-2")), "PERMISSION_DENIED");
  EXPECT_EQ(ReasonOf(some.Delete(prefix + "student-2")), "PERMISSION_DENIED");
  EXPECT_EQ(ReasonOf(some.Get(prefix + "teacher")), "PERMISSION_DENIED");
  EXPECT_EQ(ReasonOf(some.Get(prefix + "no-such-head")), "PERMISSION_DENIED");  // and so says nothing of what is there
  EXPECT_EQ(ReasonOf(some.Create(prefix + "student-3")), "PERMISSION_DENIED");
  for (const int page_size : {0, 1}) {
    EXPECT_EQ(some.List(page_size), (std::vector<std::string>{prefix + "student-1", prefix + "student-2"}));
  }
  // A teacher that a micro-batch names is computed with, too.
  TestHead student;
  ASSERT_EQ(ReasonOf(some.Get(prefix + "student-1", &student.head)), "OK");
  v1::MicroBatchHeader header = CrossEntropyHeader(student, 0, 0, {1});
  SetTeacher(header.mutable_terms(0), prefix + "teacher");
  ExpectError(some.Compute(header), "PERMISSION_DENIED", {{"head", prefix + "teacher"}, {"permission", "compute"}});
  // Weights come from outside by an administrator, at the end of a step by whoever trains.
  const Actor computes{channel, "computes"};
  EXPECT_EQ(ReasonOf(computes.Upload(student.head, /*closes_step=*/false)), "PERMISSION_DENIED");
  EXPECT_EQ(ReasonOf(computes.Upload(student.head, /*closes_step=*/true)), "STEP_NOT_SEALED");
  EXPECT_EQ(ReasonOf(Actor{channel, "administers"}.Upload(student.head, /*closes_step=*/true)), "PERMISSION_DENIED");
  EXPECT_EQ(ReasonOf(some.Delete(prefix + "student-1")), "OK");
}

TEST(Patterns, MatchAsGlobsDo) {
  using service::MatchesPattern;
  EXPECT_TRUE(MatchesPattern("*", "anything"));
  EXPECT_TRUE(MatchesPattern("a*", "a"));
  EXPECT_TRUE(MatchesPattern("*-*-c", "a-b-b-c"));
  EXPECT_TRUE(MatchesPattern("a*b*c", "aXbYbc"));
  EXPECT_TRUE(MatchesPattern("head", "head"));
  EXPECT_FALSE(MatchesPattern("head", "head2"));
  EXPECT_FALSE(MatchesPattern("head", "hea"));
  EXPECT_FALSE(MatchesPattern("a*b", "abc"));
  EXPECT_FALSE(MatchesPattern("", "a"));
  EXPECT_FALSE(MatchesPattern("h.ad", "head"));
  EXPECT_FALSE(MatchesPattern(std::string(30, '*') + "x", std::string(64, 'a')));
}

TEST(Rotation, TokensAreReadAgainAndABadFileChangesNothing) {
  SecuredServer server({TokenEntry("old", R"("compute": ["*"])")});
  const std::shared_ptr<grpc::Channel> channel = server.Connect("data");
  const std::string method = "/headwater.v1.SessionService/GetServerInfo";
  const auto ok = [&](const std::string& token) { return CallEmpty(channel, method, Bearer(TokenText(token))).error_code(); };
  // CallEmpty() cancels a call that has answered.
  const auto known = [&](const std::string& token) { return ok(token) != StatusCode::UNAUTHENTICATED; };
  EXPECT_TRUE(known("old"));
  EXPECT_FALSE(known("new"));
  ReplaceFile(server.token_path(), TokenFileText({TokenEntry("new", R"("compute": ["*"])")}));
  EXPECT_TRUE(Await([&] { return known("new"); }));
  EXPECT_FALSE(known("old"));
  ReplaceFile(server.token_path(), "{\"tokens\": [");
  EXPECT_TRUE(known("new"));
  ReplaceFile(server.token_path(), TokenFileText({TokenEntry("newest", "")}));
  EXPECT_TRUE(Await([&] { return known("newest"); }));
  EXPECT_FALSE(known("new"));
}

TEST(Rotation, AStreamWhoseTokenIsWithdrawnEnds) {
  SecuredServer server(kTokens);
  const std::shared_ptr<grpc::Channel> admin_channel = server.Connect("admin_unix");
  const std::shared_ptr<grpc::Channel> data_channel = server.Connect("data_unix");
  const auto stays = v1::HeadService::NewStub(admin_channel);
  const auto goes = v1::LossService::NewStub(data_channel);
  grpc::ClientContext admin_context;
  admin_context.AddMetadata("authorization", "Bearer " + TokenText("administers"));
  const auto upload = stays->UploadWeights(&admin_context);
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer " + TokenText("computes"));
  const auto stream = goes->ComputeLoss(&context);
  // Both have been let in when an answer comes that was asked for later.
  for (const auto& channel : {admin_channel, data_channel}) EXPECT_EQ(headwater::testing::Health(channel, ""), 1);
  std::vector<std::string> others;
  for (const std::string& entry : kTokens) {
    if (entry.find("\"computes\"") == std::string::npos) others.push_back(entry);
  }
  ASSERT_EQ(others.size() + 1, kTokens.size());
  ReplaceFile(server.token_path(), TokenFileText(others));
  const grpc::Status ended = EndOf(*stream);
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(ended.error_message(), HasSubstr("one that it does not know"));
  // The other one's stream goes on until it is half-closed, without a header.
  upload->WritesDone();
  EXPECT_EQ(ReasonOf(EndOf(*upload)), "PROTOCOL_VIOLATION");
}

TEST(Rotation, CertificatesAreReadAgain) {
  SecuredServer server(kTokens);
  const TestAuthority new_servers("new servers");
  const TestAuthority new_clients("new clients");
  const Credentials new_client = new_clients.Issue("client");
  const auto get = [&](const TestAuthority& root, const Credentials& client) {
    return headwater::testing::Health(server.Connect("data", client, root.certificate()), "") == 1;
  };
  const std::shared_ptr<grpc::Channel> before = server.Connect("data");
  EXPECT_EQ(headwater::testing::Health(before, ""), 1);
  EXPECT_FALSE(get(new_servers, new_client));
  const Credentials fresh = new_servers.Issue("server");
  ReplaceFile(server.key_path(), fresh.key);
  ReplaceFile(server.certificate_path(), fresh.certificate);
  ReplaceFile(server.client_ca_path(), new_clients.certificate());
  EXPECT_TRUE(Await([&] { return get(new_servers, new_client); }));
  EXPECT_EQ(headwater::testing::Health(before, ""), 1);  // a connection that was made stays
  EXPECT_FALSE(get(server.server_authority(), server.client_authority().Issue("client")));
}

// The version that a client with a good certificate and the port agree on, if the client knows those from 1.0 to `most`.
std::string Negotiate(const SecuredServer& server, int most) {
  const Credentials client = server.client_authority().Issue("client");
  ReplaceFile(server.token_path() + ".crt", client.certificate);
  ReplaceFile(server.token_path() + ".key", client.key);
  const std::string address = server.address("data");
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  SSL_CTX_set_security_level(context, 0);
  SSL_CTX_set_min_proto_version(context, TLS1_VERSION);
  SSL_CTX_set_max_proto_version(context, most);
  EXPECT_EQ(SSL_CTX_use_certificate_file(context, (server.token_path() + ".crt").c_str(), SSL_FILETYPE_PEM), 1);
  EXPECT_EQ(SSL_CTX_use_PrivateKey_file(context, (server.token_path() + ".key").c_str(), SSL_FILETYPE_PEM), 1);
  BIO* const connection = BIO_new_ssl_connect(context);
  SSL* ssl = nullptr;
  BIO_get_ssl(connection, &ssl);
  const unsigned char http2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(ssl, http2, sizeof(http2));
  BIO_set_conn_hostname(connection, address.c_str());
  const bool connected = BIO_do_connect(connection) == 1 && BIO_do_handshake(connection) == 1;
  const std::string version = connected ? SSL_get_version(ssl) : "";
  BIO_free_all(connection);
  SSL_CTX_free(context);
  return version;
}

TEST(Tls, IsOfVersion12Or13) {
  SecuredServer server(kTokens);
  EXPECT_EQ(Negotiate(server, TLS1_VERSION), "");
  EXPECT_EQ(Negotiate(server, TLS1_1_VERSION), "");
  EXPECT_EQ(Negotiate(server, TLS1_2_VERSION), "TLSv1.2");
  EXPECT_EQ(Negotiate(server, TLS1_3_VERSION), "TLSv1.3");
}

TEST(UnixSockets, HaveTheirModeAndOwner) {
  WireServer usual;
  struct stat about {};
  ASSERT_EQ(stat((usual.directory() + "/socket").c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0600u);
  ServerSetup setup;
  setup.options.unix_socket_mode = 0660;
  setup.options.unix_socket_owner = absl::StrCat(getuid(), ":", getgid());
  WireServer server(setup);
  ASSERT_EQ(stat((server.directory() + "/socket").c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0660u);
  EXPECT_EQ(about.st_uid, getuid());
  EXPECT_EQ(about.st_gid, getgid());
}

TEST(Options, WithoutMeaningAreRefusedAtTheStart) {
  SecuredServer other(kTokens);  // its files
  const auto refused = [](const std::function<void(service::ServerOptions&)>& edit, const std::string& why) {
    ServerSetup setup;
    edit(setup.options);
    EXPECT_THAT([&] { WireServer server(setup); }, ::testing::ThrowsMessage<std::runtime_error>(HasSubstr(why)));
  };
  const auto pair = [&](const std::string& certificate) {
    return [&, certificate](service::ServerOptions& options) {
      options.tls_certificate = certificate;
      options.tls_key = other.key_path();
    };
  };
  refused([&](auto& o) { o.tls_certificate = other.certificate_path(); }, "expected both or neither");
  refused([&](auto& o) { o.tls_client_ca = other.client_ca_path(); }, "tls_client_ca");
  refused(pair(other.client_ca_path()), "tls_key");
  refused(pair("/no/such/file"), "tls_certificate");
  refused([](auto& o) { o.token_file = "/no/such/file"; }, "token_file");
  refused([](auto& o) { o.unix_socket_mode = 01000; }, "unix_socket_mode");
  refused([](auto& o) { o.unix_socket_owner = "no-such-user"; }, "unix_socket_owner");
  refused([](auto& o) { o.admin_listen_addresses = {"unix-abstract:name"}; },
          "admin_listen_addresses: expected host:port or unix:PATH, got \"unix-abstract:name\"");
}

std::string TokensError(const std::string& text) {
  const auto tokens = service::ParseTokens(text);
  return tokens.ok() ? "" : std::string(tokens.status().message());
}

TEST(TokenFiles, AreParsedStrictly) {
  const std::string digest(64, 'a');
  const auto one = [&](const std::string& rest) { return TokensError("{\"tokens\": [{" + rest + "}]}"); };
  const std::string good = "\"name\": \"n\", \"sha256\": \"" + digest + "\"";
  EXPECT_EQ(one(good), "");
  EXPECT_EQ(TokensError("{\"tokens\": []}"), "");
  EXPECT_THAT(TokensError("[]"), HasSubstr("object"));
  EXPECT_THAT(TokensError("{}"), HasSubstr("tokens: expected an array"));
  EXPECT_THAT(TokensError("{\"tokens\": [], \"more\": 1}"), HasSubstr("no other members"));
  EXPECT_THAT(TokensError("{\"tokens\": [1]}"), HasSubstr("tokens[0]: expected an object"));
  EXPECT_THAT(one("\"sha256\": \"" + digest + "\""), HasSubstr("tokens[0].name"));
  EXPECT_THAT(one("\"name\": \"a b\", \"sha256\": \"" + digest + "\""), HasSubstr("tokens[0].name"));
  EXPECT_THAT(one("\"name\": \"n\", \"sha256\": \"" + digest.substr(1) + "\""), HasSubstr("tokens[0].sha256"));
  EXPECT_THAT(one("\"name\": \"n\", \"token\": \"secret\""), Not(HasSubstr("secret")));
  EXPECT_THAT(one("\"name\": \"n\", \"sha256\": \"secret\""), Not(HasSubstr("secret")));
  EXPECT_THAT(one(good + ", \"tenant\": \"Team\""), HasSubstr("tokens[0].tenant"));
  EXPECT_THAT(one(good + ", \"tenant\": 1"), HasSubstr("tokens[0].tenant"));
  EXPECT_THAT(one(good + ", \"compute\": \"*\""), HasSubstr("tokens[0].compute"));
  EXPECT_THAT(one(good + ", \"compute\": [\"a/b\"]"), HasSubstr("tokens[0].compute"));
  EXPECT_THAT(one(good + ", \"admin\": [true]"), HasSubstr("tokens[0].admin"));
  EXPECT_THAT(one(good + ", \"name\": \"again\""), HasSubstr("repeated key"));
  EXPECT_THAT(TokensError("{\"tokens\": [{" + good + "}, {" + good + "}]}"), HasSubstr("tokens[1].name"));
}

}  // namespace
}  // namespace headwater::testing
