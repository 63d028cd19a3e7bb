// The ports of a server: their addresses, the access to Unix sockets, and TLS. The files of TLS are checked at the start. gRPC
// reads them again when they change.
#ifndef HEADWATER_SERVER_SERVICE_ACCESS_PORTS_H_
#define HEADWATER_SERVER_SERVICE_ACCESS_PORTS_H_

#include <grpcpp/security/server_credentials.h>
#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/guard/call_guard.h"
#include "server/observability/metrics.h"
#include "server/observability/repeated_task.h"
#include "server/service/server_options.h"

namespace headwater::service {

// An address that a server listens on.
struct ListenAddress {
  std::string path;  // of unix:PATH and unix://PATH; empty: host:port
  std::string host;
  int port = 0;

  bool is_unix() const { return !path.empty(); }
  // Whether only processes of this host can reach it.
  bool is_local() const;
};
// InvalidArgument unless it is host:port or unix:PATH.
absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& address);

// The owner of a Unix socket, and its permissions. Absent: as the process makes it.
struct SocketAccess {
  std::optional<uid_t> user;
  std::optional<gid_t> group;
  mode_t mode = 0600;
};
// `owner` is USER, USER:GROUP or :GROUP, by name or number; or empty. InvalidArgument for an unknown one, and for a mode that is
// not from 0 to 0777.
absl::StatusOr<SocketAccess> MakeSocketAccess(const std::string& owner, int mode);

// Gives a Unix socket its owner and mode. Unavailable if that fails.
absl::Status SetSocketAccess(const std::string& path, const SocketAccess& access);

// Credentials for host:port addresses: TLS 1.2 or later with the options' files, or none at all without tls_certificate. Calls are
// counted (guard/call_guard.h).
// InvalidArgument for options without meaning, and for files that cannot be used: not there, not PEM, a key of another certificate.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const ServerOptions& options,
                                                                               std::shared_ptr<guard::CallBacklog> backlog);

// Reports the certificates of the options' files, with their dates, in log and metrics: at once, and within two seconds whenever a
// file has changed. A certificate that has ended is a warning. Without tls_certificate there is nothing to report.
class CertificateWatch {
 public:
  // Both must outlive the watch.
  CertificateWatch(const ServerOptions& options, observability::Metrics& metrics);

 private:
  // Reports the files if they have changed.
  void Look();

  const ServerOptions& options_;
  observability::Metrics& metrics_;
  std::string identities_;                           // of the files that were reported last
  std::optional<observability::RepeatedTask> look_;  // last: it uses the members above; none without TLS
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ACCESS_PORTS_H_
