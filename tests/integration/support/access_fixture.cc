#include "tests/integration/support/access_fixture.h"

#include <openssl/evp.h>

#include <stdexcept>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "headwater/kernels/engine.h"
#include "tests/integration/support/raw_call.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {

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

SecuredServer::SecuredServer(const std::vector<std::string>& token_entries, std::shared_ptr<group::GroupAssembly> group,
                             const std::string& worker_token) {
  const Credentials server = server_authority_.Issue("server");
  ReplaceFile(certificate_path(), server.certificate);
  ReplaceFile(key_path(), server.key);
  ReplaceFile(client_ca_path(), client_authority_.certificate());
  ReplaceFile(token_path(), TokenFileText(token_entries));
  service::ServerOptions options;
  options.listen_addresses = {"127.0.0.1:0", absl::StrCat("unix:", folder_.path(), "/data.sock")};
  options.admin_listen_addresses = {"127.0.0.1:0", absl::StrCat("unix:", folder_.path(), "/admin.sock")};
  options.tls_certificate = certificate_path();
  options.tls_key = key_path();
  options.tls_client_ca = client_ca_path();
  options.token_file = token_path();
  options.reflection = true;
  options.group = group;
  options.worker_token = worker_token;
  EngineOptions engine;
  engine.thread_count = 1;
  server_ = Valued(
      service::Server::Start(options, group != nullptr ? group->TakeEngine() : Valued(CreateCpuEngine(engine), "CreateCpuEngine")),
      "Server::Start");
  if (group == nullptr) {
    if (absl::Status ready = server_->BecomeReady(); !ready.ok()) throw std::runtime_error(std::string(ready.message()));
  }
  addresses_ = {{"data", server_->addresses()[0]},
                {"data_unix", server_->addresses()[1]},
                {"admin", server_->admin_addresses()[0]},
                {"admin_unix", server_->admin_addresses()[1]}};
}

std::vector<std::string> SecuredServer::ports() const {
  std::vector<std::string> names;
  for (const auto& [name, address] : addresses_) names.push_back(name);
  return names;
}

std::shared_ptr<grpc::Channel> SecuredServer::Connect(const std::string& port, const Credentials& client,
                                                      const std::string& root) const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  const bool plain = absl::StartsWith(address(port), "unix:");
  return grpc::CreateCustomChannel(
      address(port), plain ? grpc::InsecureChannelCredentials() : grpc::SslCredentials({root, client.key, client.certificate}),
      arguments);
}

grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& path,
                       const std::vector<std::string>& authorization) {
  return CallRaw(channel, path, {""}, {.authorization = authorization, .on_answer = [](const std::string&) { return false; }})
      .status;
}

}  // namespace headwater::testing
