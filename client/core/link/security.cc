#include "client/core/link/security.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "client/core/link/target.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

// How often gRPC looks at the files, in seconds; its least.
constexpr unsigned int kRefreshSeconds = 1;
constexpr size_t kMostTokenBytes = 4096;
// Time for a handshake that finds out why gRPC's fails.
constexpr int kProbeSeconds = 2;  // OpenSSL counts whole seconds of the clock: at least one
constexpr int kProbeNapMs = 20;

absl::Status Invalid(const char* field, const std::string& expected) {
  return MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument,
                        absl::StrCat("ClientOptions.", field, ": expected ", expected), {{"field", field}, {"expected", expected}});
}

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" ||
         (absl::StartsWith(host, "127.") && host.find_first_not_of("0123456789.") == std::string::npos);
}

absl::Status CheckPem(const char* field, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (file && absl::StrContains(text.str(), "-----BEGIN ")) return absl::OkStatus();
  return Invalid(field, absl::StrCat("a PEM file that can be read, got ", path));
}

// OpenSSL's reason, which quotes nothing of a file.
std::string TlsReason() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "it cannot be read" : reason;
}

// gRPC says on the standard error output alone, and at each try to connect, that a certificate and its key cannot be used.
absl::Status CheckClientCertificate(const TlsOptions& tls) {
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  if (context == nullptr) return absl::ResourceExhaustedError("no TLS context can be made");
  // A key with a passphrase is refused, not asked for at a terminal.
  SSL_CTX_set_default_passwd_cb(context.get(), [](char*, int, int, void*) { return 0; });
  ERR_clear_error();
  if (SSL_CTX_use_certificate_chain_file(context.get(), tls.client_certificate.c_str()) != 1) {
    return Invalid("tls.client_certificate", absl::StrCat("a certificate, got ", tls.client_certificate, ": ", TlsReason()));
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), tls.client_key.c_str(), SSL_FILETYPE_PEM) == 1) return absl::OkStatus();
  return Invalid("tls.client_key",
                 absl::StrCat("the key of ", tls.client_certificate, ", got ", tls.client_key, ": ", TlsReason()));
}

// One entry of every call's metadata.
class Entry final : public grpc::experimental::ClientInterceptorFactoryInterface, public grpc::experimental::Interceptor {
 public:
  Entry(const std::string& key, const std::string& value) : key_(key), value_(value) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new Entry(key_, value_);  // gRPC's, for one call
  }
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace(key_, value_);
    }
    methods->Proceed();
  }

 private:
  const std::string key_;
  const std::string value_;
};

// 00-TRACE_ID-SPAN_ID-FLAGS in lower-case hexadecimal digits, the ids not all 0.
bool IsTraceparent(absl::string_view text) {
  constexpr absl::string_view kForm = "00-tttttttttttttttttttttttttttttttt-ssssssssssssssss-ff";
  if (text.size() != kForm.size() || !absl::StartsWith(text, "00-")) return false;
  for (size_t i = 3; i < text.size(); ++i) {
    const bool is_digit = (text[i] >= '0' && text[i] <= '9') || (text[i] >= 'a' && text[i] <= 'f');
    if (kForm[i] == '-' ? text[i] != '-' : !is_digit) return false;
  }
  const auto is_zero = [&](char part) {
    const size_t begin = kForm.find(part, 3);
    return text.substr(begin, kForm.find('-', begin) - begin).find_first_not_of('0') == absl::string_view::npos;
  };
  return !is_zero('t') && !is_zero('s');
}

}  // namespace

absl::Status PrepareSecurity(const std::string& target, ClientOptions* options) {
  const std::string host = HostOf(target);
  if (options->tls.has_value()) {
    TlsOptions& tls = *options->tls;
    if (IsUnix(target)) return Invalid("tls", "none for a Unix socket, which has no TLS");
    if (tls.client_certificate.empty() != tls.client_key.empty()) {
      return Invalid("tls.client_key", "a client_certificate and its client_key, or neither");
    }
    for (const auto& [field, path] :
         {std::pair{"tls.ca_certificate", &tls.ca_certificate}, std::pair{"tls.client_certificate", &tls.client_certificate},
          std::pair{"tls.client_key", &tls.client_key}}) {
      HEADWATER_RETURN_IF_ERROR(CheckPem(field, *path));
    }
    if (!tls.client_certificate.empty()) {
      HEADWATER_RETURN_IF_ERROR(CheckClientCertificate(tls));
    }
    if (tls.server_name.empty()) tls.server_name = host;
  }
  if (!options->traceparent.empty() && !IsTraceparent(options->traceparent)) {
    return Invalid("traceparent",
                   absl::StrCat("00-TRACE_ID-SPAN_ID-FLAGS as W3C Trace Context says it, got ", options->traceparent));
  }
  if (options->token.empty()) return absl::OkStatus();
  if (options->token.size() > kMostTokenBytes ||
      !std::all_of(options->token.begin(), options->token.end(), [](char c) { return c > ' ' && c < 0x7f; })) {
    return Invalid("token", absl::StrCat("1 to ", kMostTokenBytes, " printable ASCII characters without blanks"));
  }
  if (!options->tls.has_value() && !IsUnix(target) && !IsLoopback(host) && !options->allow_plaintext_token) {
    return Invalid("token", absl::StrCat("TLS on the way to ", host,
                                         ", where everybody on the way could read the token (allow_plaintext_token sends it "
                                         "nevertheless)"));
  }
  return absl::OkStatus();
}

std::string TlsFailureOf(const std::string& target, const TlsOptions& tls) {
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  if (context == nullptr) return "";
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  const bool has_authorities = tls.ca_certificate.empty()
                                   ? SSL_CTX_set_default_verify_paths(context.get()) == 1
                                   : SSL_CTX_load_verify_locations(context.get(), tls.ca_certificate.c_str(), nullptr) == 1;
  if (!tls.client_certificate.empty()) {
    SSL_CTX_use_certificate_chain_file(context.get(), tls.client_certificate.c_str());
    SSL_CTX_use_PrivateKey_file(context.get(), tls.client_key.c_str(), SSL_FILETYPE_PEM);
  }
  const std::unique_ptr<BIO, void (*)(BIO*)> connection(BIO_new_ssl_connect(context.get()), BIO_free_all);
  SSL* ssl = nullptr;
  if (!has_authorities || connection == nullptr || BIO_get_ssl(connection.get(), &ssl) != 1 || ssl == nullptr) return "";
  SSL_set1_host(ssl, tls.server_name.c_str());
  SSL_set_tlsext_host_name(ssl, tls.server_name.c_str());
  static constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(ssl, kHttp2, sizeof(kHttp2));
  const std::string host = HostOf(target), port = target.substr(target.rfind(':') + 1);
  BIO_set_conn_hostname(connection.get(), (absl::StrContains(host, ":") ? absl::StrCat("[", host, "]") : host).c_str());
  BIO_set_conn_port(connection.get(), port.c_str());
  ERR_clear_error();
  if (BIO_do_connect_retry(connection.get(), kProbeSeconds, kProbeNapMs) == 1) return "";
  if (SSL_get_state(ssl) == TLS_ST_BEFORE) return "";  // not even connected
  const long verified = SSL_get_verify_result(ssl);
  return verified != X509_V_OK ? X509_verify_cert_error_string(verified) : TlsReason();
}

std::shared_ptr<grpc::ChannelCredentials> MakeCredentials(const ClientOptions& options) {
  if (!options.tls.has_value()) return grpc::InsecureChannelCredentials();
  const TlsOptions& tls = *options.tls;
  static auto* const mutex = new std::mutex;
  static auto* const known =
      new std::map<std::tuple<std::string, std::string, std::string>, std::weak_ptr<grpc::ChannelCredentials>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  auto& place = (*known)[{tls.ca_certificate, tls.client_certificate, tls.client_key}];
  if (auto credentials = place.lock(); credentials != nullptr) return credentials;
  grpc::experimental::TlsChannelCredentialsOptions credentials_options;
  if (!tls.ca_certificate.empty() || !tls.client_certificate.empty()) {
    credentials_options.set_certificate_provider(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        tls.client_key, tls.client_certificate, tls.ca_certificate, kRefreshSeconds));
    if (!tls.ca_certificate.empty()) credentials_options.watch_root_certs();
    if (!tls.client_certificate.empty()) credentials_options.watch_identity_key_cert_pairs();
  }
  auto credentials = grpc::experimental::TlsCredentials(credentials_options);
  place = credentials;
  return credentials;
}

void AddTlsArguments(const ClientOptions& options, grpc::ChannelArguments* arguments) {
  if (!options.tls.has_value()) return;
  // The certificate must be for the server's name also where the connection is made to one of its addresses.
  arguments->SetSslTargetNameOverride(options.tls->server_name);
  arguments->SetString(GRPC_ARG_DEFAULT_AUTHORITY, options.tls->server_name);
}

std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> MakeInterceptors(const ClientOptions& options) {
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> factories;
  if (!options.token.empty()) {
    factories.push_back(std::make_unique<Entry>("authorization", absl::StrCat("Bearer ", options.token)));
  }
  if (!options.traceparent.empty()) factories.push_back(std::make_unique<Entry>("traceparent", options.traceparent));
  return factories;
}

}  // namespace headwater::client::internal
