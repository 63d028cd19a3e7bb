#include "tests/integration/support/access_fixture.h"

#include <grpcpp/generic/generic_stub.h>
#include <openssl/evp.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "headwater/kernels/engine.h"

namespace headwater::testing {
namespace {

template <typename T>
T Valued(absl::StatusOr<T> value, const std::string& what) {
  if (!value.ok()) throw std::runtime_error(absl::StrCat(what, ": ", value.status().message()));
  return *std::move(value);
}

}  // namespace

std::string TokenText(const std::string& name) { return "token-of-" + name; }

std::string TokenEntry(const std::string& name, const std::string& rest) {
  const std::string token = TokenText(name);
  std::string digest(32, '\0');
  unsigned int size = 0;
  EVP_Digest(token.data(), token.size(), reinterpret_cast<unsigned char*>(digest.data()), &size, EVP_sha256(), nullptr);
  return absl::StrCat("{\"name\": \"", name, "\", \"sha256\": \"", absl::BytesToHexString(digest), "\"", rest.empty() ? "" : ", ",
                      rest, "}");
}

std::string TokenFileText(const std::vector<std::string>& entries) {
  return absl::StrCat("{\"tokens\": [", absl::StrJoin(entries, ",\n"), "]}\n");
}

SecuredServer::SecuredServer(const std::vector<std::string>& token_entries, bool reflection) {
  std::string pattern = (std::filesystem::temp_directory_path() / "headwater-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  directory_ = pattern;
  const Credentials server = server_authority_.Issue("server");
  WriteFile(certificate_path(), server.certificate);
  WriteFile(key_path(), server.key);
  WriteFile(client_ca_path(), client_authority_.certificate());
  WriteFile(token_path(), TokenFileText(token_entries));
  service::ServerOptions options;
  options.listen_addresses = {"127.0.0.1:0", absl::StrCat("unix:", directory_, "/data.sock")};
  options.admin_listen_addresses = {"127.0.0.1:0", absl::StrCat("unix:", directory_, "/admin.sock")};
  options.tls_certificate = certificate_path();
  options.tls_key = key_path();
  options.tls_client_ca = client_ca_path();
  options.token_file = token_path();
  options.reflection = reflection;
  EngineOptions engine;
  engine.thread_count = 1;
  server_ = Valued(service::Server::Start(options, Valued(CreateCpuEngine(engine), "CreateCpuEngine")), "Server::Start");
  if (absl::Status ready = server_->BecomeReady(); !ready.ok()) throw std::runtime_error(std::string(ready.message()));
  addresses_ = {{"data", server_->addresses()[0]},
                {"data_unix", server_->addresses()[1]},
                {"admin", server_->admin_addresses()[0]},
                {"admin_unix", server_->admin_addresses()[1]}};
}

SecuredServer::~SecuredServer() {
  server_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

std::vector<std::string> SecuredServer::ports() const {
  std::vector<std::string> names;
  for (const auto& [name, address] : addresses_) names.push_back(name);
  return names;
}

std::shared_ptr<grpc::Channel> SecuredServer::Connect(const std::string& port, const std::optional<Credentials>& client) const {
  const Credentials& shown = client.has_value() ? *client : client_;
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = server_authority_.certificate();
  options.pem_cert_chain = shown.certificate;
  options.pem_private_key = shown.key;
  return Open(port, options);
}

std::shared_ptr<grpc::Channel> SecuredServer::ConnectWithoutCertificate(const std::string& port) const {
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = server_authority_.certificate();
  return Open(port, options);
}

std::shared_ptr<grpc::Channel> SecuredServer::Open(const std::string& port, const grpc::SslCredentialsOptions& options) const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  const bool plain = absl::StartsWith(address(port), "unix:");
  return grpc::CreateCustomChannel(address(port), plain ? grpc::InsecureChannelCredentials() : grpc::SslCredentials(options),
                                   arguments);
}

grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& path,
                       const std::vector<std::string>& authorization) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  for (const std::string& value : authorization) context.AddMetadata("authorization", value);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto call = stub.PrepareCall(&context, path, &queue);
  const auto next = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  grpc::Status status;
  if (next()) {
    const grpc::Slice nothing;
    call->WriteLast(grpc::ByteBuffer(&nothing, 1), grpc::WriteOptions(), nullptr);
    next();
    grpc::ByteBuffer answer;
    // A watch never ends by itself: one answer is enough.
    call->Read(&answer, nullptr);
    if (next()) context.TryCancel();
  }
  call->Finish(&status, nullptr);
  next();
  return status;
}

}  // namespace headwater::testing
