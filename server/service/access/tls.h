// TLS of the ports: checked at the start, and read again by gRPC when the files change.
#ifndef HEADWATER_SERVER_SERVICE_ACCESS_TLS_H_
#define HEADWATER_SERVER_SERVICE_ACCESS_TLS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/guard/call_backlog.h"
#include "server/observability/metrics.h"
#include "server/observability/repeated_task.h"
#include "server/service/server_options.h"

namespace headwater::service {

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
  CertificateWatch(const CertificateWatch&) = delete;
  CertificateWatch& operator=(const CertificateWatch&) = delete;

 private:
  // Reports the files if they have changed.
  void Look();

  const ServerOptions& options_;
  observability::Metrics& metrics_;
  std::string identities_;                           // of the files that were reported last
  std::optional<observability::RepeatedTask> look_;  // last: it uses the members above; none without TLS
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ACCESS_TLS_H_
