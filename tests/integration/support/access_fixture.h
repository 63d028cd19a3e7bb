// SecuredServer: a server in this process with every kind of port, certificates and tokens, and the calls that tests of access
// make.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_ACCESS_FIXTURE_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_ACCESS_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <openssl/evp.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "headwater/kernels/engine.h"
#include "server/group/group_assembly.h"
#include "server/service/server.h"
#include "tests/integration/support/test_certificates.h"
#include "tests/integration/support/wire_server.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::testing {

inline std::string TokenText(const std::string& name) { return "token-of-" + name; }
inline std::vector<std::string> Bearer(const std::string& token) { return {"Bearer " + token}; }

// One entry of a token file, in JSON; the token's text is "token-of-NAME".
inline std::string TokenEntry(const std::string& name, const std::string& rest) {
  const std::string token = TokenText(name);
  std::string digest(32, '\0');
  unsigned int size = 0;
  EVP_Digest(token.data(), token.size(), reinterpret_cast<unsigned char*>(digest.data()), &size, EVP_sha256(), nullptr);
  return absl::StrCat("{\"name\": \"", name, "\", \"sha256\": \"", absl::BytesToHexString(digest), "\"", rest.empty() ? "" : ", ",
                      rest, "}");
}
inline std::string TokenFileText(const std::vector<std::string>& entries) {
  return absl::StrCat("{\"tokens\": [", absl::StrJoin(entries, ",\n"), "]}\n");
}

class SecuredServer {
 public:
  // Ports by name: "data" and "admin" (TLS, with client certificates), "data_unix" and "admin_unix".
  // `group`: its leader, which waits for workers with this token.
  explicit SecuredServer(const std::vector<std::string>& token_entries, std::shared_ptr<group::GroupAssembly> group = nullptr,
                         const std::string& worker_token = "") {
    const Credentials server = server_authority_.Issue("server");
    ReplaceFile(certificate_path(), server.certificate);
    ReplaceFile(key_path(), server.key);
    ReplaceFile(client_ca_path(), client_authority_.certificate());
    ReplaceFile(token_path(), TokenFileText(token_entries));
    service::ServerOptions options;
    options.listen_addresses = {"127.0.0.1:0", absl::StrCat("unix:", path("data.sock"))};
    options.admin_listen_addresses = {"127.0.0.1:0", absl::StrCat("unix:", path("admin.sock"))};
    options.tls_certificate = certificate_path();
    options.tls_key = key_path();
    options.tls_client_ca = client_ca_path();
    options.token_file = token_path();
    options.reflection = true;
    options.group = group;
    options.worker_token = worker_token;
    EngineOptions engine;
    engine.thread_count = 1;
    server_ = Value(service::Server::Start(options, group != nullptr ? group->TakeEngine() : Value(CreateCpuEngine(engine))));
    if (group == nullptr) {
      if (absl::Status ready = server_->BecomeReady(); !ready.ok()) throw std::runtime_error(std::string(ready.message()));
    }
    addresses_ = {{"data", server_->addresses()[0]},
                  {"data_unix", server_->addresses()[1]},
                  {"admin", server_->admin_addresses()[0]},
                  {"admin_unix", server_->admin_addresses()[1]}};
  }

  const std::map<std::string, std::string>& addresses() const { return addresses_; }
  const std::string& address(const std::string& port) const { return addresses_.at(port); }
  // With a certificate that the server trusts, or these credentials, which may be empty; trusts the server's authority, or this
  // one. A connection of its own.
  std::shared_ptr<grpc::Channel> Connect(const std::string& port) const { return Connect(port, client_); }
  std::shared_ptr<grpc::Channel> Connect(const std::string& port, const Credentials& client) const {
    return Connect(port, client, server_authority_.certificate());
  }
  std::shared_ptr<grpc::Channel> Connect(const std::string& port, const Credentials& client, const std::string& root) const {
    if (absl::StartsWith(address(port), "unix:")) return OwnChannel(address(port));
    return OwnChannel(address(port), grpc::SslCredentials({root, client.key, client.certificate}));
  }

  // ---- files that the server reads
  std::string path(const std::string& name) const { return absl::StrCat(folder_.path(), "/", name); }
  std::string certificate_path() const { return path("server.crt"); }
  std::string key_path() const { return path("server.key"); }
  std::string client_ca_path() const { return path("clients.crt"); }
  std::string token_path() const { return path("tokens.json"); }

  const TestAuthority& server_authority() const { return server_authority_; }
  const TestAuthority& client_authority() const { return client_authority_; }
  service::Server& server() { return *server_; }

 private:
  const TestAuthority server_authority_{"servers"};
  const TestAuthority client_authority_{"clients"};
  const Credentials client_ = client_authority_.Issue("client");
  const TemporaryDirectory folder_;
  std::map<std::string, std::string> addresses_;
  std::unique_ptr<service::Server> server_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_ACCESS_FIXTURE_H_
