#include "server/service/access/ports.h"

#include <grp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "headwater/kernels/return_if_error.h"
#include "server/guard/call_guard.h"
#include "server/observability/logging.h"

namespace headwater::service {
namespace {

absl::Status NoOwner(const char* what, const std::string& name) {
  return absl::InvalidArgumentError(absl::StrCat("unix_socket_owner: there is no ", what, " \"", name, "\""));
}

using observability::LogField;
using observability::LogLevel;

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

absl::StatusOr<absl::Time> TimeOf(const ASN1_TIME* asn1) {
  tm utc{};
  if (ASN1_TIME_to_tm(asn1, &utc) != 1) return absl::InvalidArgumentError("a certificate has a date that cannot be read");
  return absl::FromTM(utc, absl::UTCTimeZone());
}

// The validity of the files' certificates.
struct Validity {
  absl::Time begin;                                   // of the server's own certificate
  absl::Time end = absl::InfiniteFuture();            // the first end of the chain's
  absl::Time client_ca_end = absl::InfiniteFuture();  // the first end of the authorities'; without --tls_client_ca never
};

absl::Status TakeEnd(const X509* certificate, absl::Time* first_end) {
  HEADWATER_ASSIGN_OR_RETURN(const absl::Time end, TimeOf(X509_get0_notAfter(certificate)));
  *first_end = std::min(*first_end, end);
  return absl::OkStatus();
}

// InvalidArgument for files that cannot be used.
absl::StatusOr<Validity> CheckFiles(const ServerOptions& options) {
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
  const X509* const own = SSL_CTX_get0_certificate(context.get());
  Validity validity;
  HEADWATER_ASSIGN_OR_RETURN(validity.begin, TimeOf(X509_get0_notBefore(own)));
  HEADWATER_RETURN_IF_ERROR(TakeEnd(own, &validity.end));
  STACK_OF(X509)* chain = nullptr;
  SSL_CTX_get0_chain_certs(context.get(), &chain);
  for (int i = 0; i < sk_X509_num(chain); ++i) HEADWATER_RETURN_IF_ERROR(TakeEnd(sk_X509_value(chain, i), &validity.end));
  STACK_OF(X509_OBJECT)* const authorities = X509_STORE_get0_objects(SSL_CTX_get_cert_store(context.get()));
  for (int i = 0; i < sk_X509_OBJECT_num(authorities); ++i) {
    const X509* const authority = X509_OBJECT_get0_X509(sk_X509_OBJECT_value(authorities, i));
    if (authority != nullptr) HEADWATER_RETURN_IF_ERROR(TakeEnd(authority, &validity.client_ca_end));
  }
  return validity;
}

// Distinguishes a file from a later one of its name.
std::string IdentityOf(const std::string& path) {
  struct stat file {};
  if (path.empty() || stat(path.c_str(), &file) != 0) return "none";
  return absl::StrCat(file.st_dev, ":", file.st_ino, ":", file.st_size, ":", file.st_mtim.tv_sec, ".", file.st_mtim.tv_nsec, ":",
                      file.st_ctim.tv_sec, ".", file.st_ctim.tv_nsec);
}

std::string Text(absl::Time time) { return absl::FormatTime(absl::RFC3339_sec, time, absl::UTCTimeZone()); }

void LogValidity(const Validity& validity, bool asks_clients) {
  const absl::Time now = absl::Now();
  std::vector<LogField> fields = {{"client_certificates", asks_clients ? "required" : "not asked for"},
                                  {"certificate_begins", Text(validity.begin)},
                                  {"certificate_ends", Text(validity.end)}};
  if (asks_clients) fields.emplace_back("client_ca_ends", Text(validity.client_ca_end));
  const char* problem = nullptr;
  if (validity.end <= now) {
    problem = "the certificate has ended: clients refuse it";
  } else if (validity.begin > now) {
    problem = "the certificate is not valid yet: clients refuse it";
  } else if (validity.client_ca_end <= now) {
    problem = "an authority of tls_client_ca has ended: clients whose certificates it has signed are refused";
  }
  if (problem != nullptr) fields.emplace_back("message", problem);
  observability::Log(problem != nullptr ? LogLevel::kWarning : LogLevel::kInfo, "tls", fields);
}

}  // namespace

absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& address) {
  ListenAddress parsed;
  absl::string_view path = address;
  if (absl::ConsumePrefix(&path, "unix:")) {
    absl::ConsumePrefix(&path, "//");
    parsed.path = std::string(path);
    if (!path.empty()) return parsed;
  }
  // Others than unix: have no permissions (unix-abstract:), or are not what a server listens on.
  const size_t colon = address.rfind(':');
  if (colon != std::string::npos && colon > 0 && !absl::StartsWith(address, "unix") && !absl::StrContains(address, "/") &&
      absl::SimpleAtoi(address.substr(colon + 1), &parsed.port) && parsed.port >= 0 && parsed.port <= 65535) {
    parsed.host = address.substr(0, colon);
    return parsed;
  }
  return absl::InvalidArgumentError(absl::StrCat("expected host:port or unix:PATH, got \"", address, "\""));
}

bool ListenAddress::is_local() const {
  return is_unix() || host == "localhost" || host == "[::1]" || host == "::1" || absl::StartsWith(host, "127.");
}

absl::StatusOr<SocketAccess> MakeSocketAccess(const std::string& owner, int mode) {
  if (mode < 0 || mode > 0777) return absl::InvalidArgumentError("unix_socket_mode: expected permissions from 0 to 0777, in octal");
  SocketAccess access;
  access.mode = static_cast<mode_t>(mode);
  const size_t colon = owner.find(':');
  const std::string user = owner.substr(0, colon);
  const std::string group = colon == std::string::npos ? "" : owner.substr(colon + 1);
  uint32_t number = 0;
  if (absl::SimpleAtoi(user, &number)) {
    access.user = number;
  } else if (!user.empty()) {
    const passwd* const entry = getpwnam(user.c_str());  // NOLINT(concurrency-mt-unsafe): at the start
    if (entry == nullptr) return NoOwner("user", user);
    access.user = entry->pw_uid;
  }
  if (absl::SimpleAtoi(group, &number)) {
    access.group = number;
  } else if (!group.empty()) {
    const ::group* const entry = getgrnam(group.c_str());  // NOLINT(concurrency-mt-unsafe): at the start
    if (entry == nullptr) return NoOwner("group", group);
    access.group = entry->gr_gid;
  }
  return access;
}

absl::Status SetSocketAccess(const std::string& path, const SocketAccess& access) {
  const auto cannot = [&](const char* what) {
    return absl::UnavailableError(absl::StrCat("unix:", path, ": cannot set ", what, ": ", std::strerror(errno)));
  };
  // The owner first: until then no other user has any permission.
  if ((access.user.has_value() || access.group.has_value()) &&
      lchown(path.c_str(), access.user.value_or(static_cast<uid_t>(-1)), access.group.value_or(static_cast<gid_t>(-1))) != 0) {
    return cannot("unix_socket_owner");
  }
  if (chmod(path.c_str(), access.mode) != 0) return cannot("unix_socket_mode");
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const ServerOptions& options,
                                                                               std::shared_ptr<guard::CallBacklog> backlog) {
  if (options.tls_certificate.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError("tls_certificate and tls_key: expected both or neither");
  }
  if (options.tls_certificate.empty()) {
    if (!options.tls_client_ca.empty()) return absl::InvalidArgumentError("tls_client_ca: expected a tls_certificate with it");
    return guard::CountCalls(grpc_insecure_server_credentials_create(), std::move(backlog));
  }
  HEADWATER_RETURN_IF_ERROR(CheckFiles(options).status());
  grpc::experimental::TlsServerCredentialsOptions tls(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      options.tls_key, options.tls_certificate, options.tls_client_ca, kRefreshSeconds));
  tls.watch_identity_key_cert_pairs();
  if (!options.tls_client_ca.empty()) {
    tls.watch_root_certs();
    tls.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  // gRPC speaks TLS 1.2 and 1.3 only.
  return guard::CountCalls(grpc_tls_server_credentials_create(tls.c_credentials_options()), std::move(backlog));
}

CertificateWatch::CertificateWatch(const ServerOptions& options, observability::Metrics& metrics)
    : options_(options), metrics_(metrics) {
  if (options.tls_certificate.empty()) return;
  Look();
  look_.emplace(absl::Seconds(kRefreshSeconds), [this] { Look(); });
}

void CertificateWatch::Look() {
  std::string identities;
  for (const std::string& path : {options_.tls_certificate, options_.tls_key, options_.tls_client_ca}) {
    absl::StrAppend(&identities, IdentityOf(path), " ");
  }
  if (identities == identities_) return;
  identities_ = std::move(identities);
  const absl::StatusOr<Validity> validity = CheckFiles(options_);
  if (!validity.ok()) {
    observability::Log(LogLevel::kWarning, "tls_files_not_usable",
                       {{"message", absl::StrCat(validity.status().message(), "; no client can connect while that is so")}});
    return;
  }
  const bool asks_clients = !options_.tls_client_ca.empty();
  LogValidity(*validity, asks_clients);
  const auto set_end = [this](observability::CertificateUse use, absl::Time end) {
    metrics_.Set(observability::Metric::kTlsCertificateEnd, absl::ToDoubleSeconds(end - absl::UnixEpoch()), use);
  };
  set_end(observability::CertificateUse::kServer, validity->end);
  if (asks_clients) set_end(observability::CertificateUse::kClientCa, validity->client_ca_end);
}

}  // namespace headwater::service
