#include "server/service/tls.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/observability/logging.h"
#include "server/service/counted_credentials.h"

namespace headwater::service {
namespace {

// How often gRPC looks at the files, in seconds; its least.
constexpr unsigned int kRefreshSeconds = 1;

// The reason that OpenSSL gives, which quotes nothing of a file.
std::string Reason() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "it cannot be read" : reason;
}

absl::Status Unusable(const char* option, const std::string& path) {
  return absl::InvalidArgumentError(absl::StrCat(option, ": ", path, ": ", Reason()));
}

// A key with a passphrase is refused, not asked for at a terminal.
int NoPassphrase(char*, int, int, void*) { return 0; }

absl::Status CheckFiles(const ServerOptions& options) {
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  if (context == nullptr) return absl::InternalError("no TLS context can be made");
  SSL_CTX_set_default_passwd_cb(context.get(), NoPassphrase);
  ERR_clear_error();
  if (SSL_CTX_use_certificate_chain_file(context.get(), options.tls_certificate.c_str()) != 1) {
    return Unusable("tls_certificate", options.tls_certificate);
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), options.tls_key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return Unusable("tls_key", options.tls_key);
  }
  if (SSL_CTX_check_private_key(context.get()) != 1) return Unusable("tls_key", options.tls_key);
  if (!options.tls_client_ca.empty() && SSL_CTX_load_verify_locations(context.get(), options.tls_client_ca.c_str(), nullptr) != 1) {
    return Unusable("tls_client_ca", options.tls_client_ca);
  }
  tm end_tm{};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(SSL_CTX_get0_certificate(context.get())), &end_tm) == 1) {
    const absl::Time end = absl::FromTM(end_tm, absl::UTCTimeZone());
    observability::Log(end <= absl::Now() ? observability::LogLevel::kWarning : observability::LogLevel::kInfo, "tls",
                       {{"client_certificates", options.tls_client_ca.empty() ? "not asked for" : "required"},
                        {"certificate_ends", absl::FormatTime(absl::RFC3339_sec, end, absl::UTCTimeZone())}});
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const ServerOptions& options,
                                                                               std::shared_ptr<transport::CallBacklog> backlog) {
  if (options.tls_certificate.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError("tls_certificate and tls_key: expected both or neither");
  }
  if (options.tls_certificate.empty()) {
    if (!options.tls_client_ca.empty()) return absl::InvalidArgumentError("tls_client_ca: expected a tls_certificate with it");
    return CountCalls(grpc_insecure_server_credentials_create(), std::move(backlog));
  }
  if (absl::Status status = CheckFiles(options); !status.ok()) return status;
  grpc::experimental::TlsServerCredentialsOptions tls(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      options.tls_key, options.tls_certificate, options.tls_client_ca, kRefreshSeconds));
  tls.watch_identity_key_cert_pairs();
  if (!options.tls_client_ca.empty()) {
    tls.watch_root_certs();
    tls.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  // gRPC speaks TLS 1.2 and 1.3 only.
  return CountCalls(grpc_tls_server_credentials_create(tls.c_credentials_options()), std::move(backlog));
}

}  // namespace headwater::service
