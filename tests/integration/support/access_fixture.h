// SecuredServer: a server in this process with every kind of port, certificates and tokens, and the calls that tests of access
// make.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_ACCESS_FIXTURE_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_ACCESS_FIXTURE_H_

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/group/group_assembly.h"
#include "server/service/server.h"
#include "tests/integration/support/test_certificates.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::testing {

// One entry of a token file, in JSON; the token's text is "token-of-NAME".
std::string TokenEntry(const std::string& name, const std::string& rest);
std::string TokenText(const std::string& name);
std::string TokenFileText(const std::vector<std::string>& entries);

class SecuredServer {
 public:
  // Ports by name: "data" and "admin" (TLS, with client certificates), "data_unix" and "admin_unix".
  // `group`: its leader, which waits for workers with this token.
  explicit SecuredServer(const std::vector<std::string>& token_entries, std::shared_ptr<group::GroupAssembly> group = nullptr,
                         const std::string& worker_token = "");

  const std::string& address(const std::string& port) const { return addresses_.at(port); }
  std::vector<std::string> ports() const;
  // With a certificate that the server trusts, or these credentials, which may be empty; trusts the server's authority, or this
  // one. A connection of its own.
  std::shared_ptr<grpc::Channel> Connect(const std::string& port) const { return Connect(port, client_); }
  std::shared_ptr<grpc::Channel> Connect(const std::string& port, const Credentials& client) const {
    return Connect(port, client, server_authority_.certificate());
  }
  std::shared_ptr<grpc::Channel> Connect(const std::string& port, const Credentials& client, const std::string& root) const;

  // ---- files that the server reads
  std::string certificate_path() const { return folder_.path() + "/server.crt"; }
  std::string key_path() const { return folder_.path() + "/server.key"; }
  std::string client_ca_path() const { return folder_.path() + "/clients.crt"; }
  std::string token_path() const { return folder_.path() + "/tokens.json"; }

  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

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

// Calls a method of any kind with one empty message, and with these values of "authorization".
grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& path,
                       const std::vector<std::string>& authorization);
inline std::vector<std::string> Bearer(const std::string& token) { return {"Bearer " + token}; }

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_ACCESS_FIXTURE_H_
