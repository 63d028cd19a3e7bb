#include "client/ctl/connection.h"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "client/ctl/arguments.h"
#include "headwater/kernels/return_if_error.h"
#include "server/flags/flag_types.h"

ABSL_FLAG(std::string, server, "localhost:50051", "where headwaterd listens: host:port or unix:PATH");
ABSL_FLAG(std::string, tenant, "default", "whose heads short names mean, and `heads` lists");
ABSL_FLAG(headwater::DurationFlag, timeout, absl::Minutes(30), "longest time of one call");
ABSL_FLAG(headwater::DurationFlag, connect_timeout, absl::Seconds(5), "how long to wait for the server to answer");

ABSL_FLAG(std::string, ca_certificate, "",
          "file with the authorities, in PEM, that may have signed the server's certificate, `system` for those of the system: "
          "connects with TLS; if not given: $HEADWATER_CA_CERTIFICATE");
ABSL_FLAG(std::string, client_certificate, "",
          "file with the certificate to show to the server, in PEM; if not given: $HEADWATER_CLIENT_CERTIFICATE");
ABSL_FLAG(std::string, client_key, "", "file with its key; if not given: $HEADWATER_CLIENT_KEY");
ABSL_FLAG(std::string, token_file, "", "file with the token to send, and nothing else; if not given: $HEADWATER_TOKEN_FILE");

namespace headwater::ctl {
namespace {

// The flag, or, where it was not given, the environment.
std::string FlagOr(const absl::Flag<std::string>& flag, const char* variable) {
  std::string value = absl::GetFlag(flag);
  if (!value.empty()) return value;
  const char* const set = std::getenv(variable);
  return set == nullptr ? "" : set;
}

// The first line of the file, which is not said anywhere.
absl::StatusOr<std::string> ReadToken(const std::string& path) {
  std::ifstream file(path);
  std::string token;
  std::getline(file, token);
  std::string more;
  if (!file && token.empty()) return UsageError(absl::StrCat("--token_file: cannot read a token from ", path));
  if (std::getline(file, more) && !more.empty()) {
    return UsageError(absl::StrCat("--token_file: ", path, " has more than one line; expected a token and nothing else"));
  }
  return token;
}

// An error of the client library, which speaks of its own options.
std::string InFlagsWords(const std::string& message) {
  return absl::StrReplaceAll(message, {{"ClientOptions.token", "--token_file"},
                                       {"ClientOptions.tls.ca_certificate", "--ca_certificate"},
                                       {"ClientOptions.tls.certificate", "--client_certificate"},
                                       {"ClientOptions.tls.key", "--client_key"},
                                       {"ClientOptions.", "--"}});
}

}  // namespace

std::string ServerAddress() { return absl::GetFlag(FLAGS_server); }

void SetServerAddress(const std::string& address) { absl::SetFlag(&FLAGS_server, address); }

std::string Tenant() { return absl::GetFlag(FLAGS_tenant); }

absl::StatusOr<client::Client> Connect(client::Transport transport, bool session) {
  for (const auto& [flag, duration] :
       {std::pair("timeout", absl::GetFlag(FLAGS_timeout)), std::pair("connect_timeout", absl::GetFlag(FLAGS_connect_timeout))}) {
    if (duration < absl::Milliseconds(1)) {
      return UsageError(absl::StrCat("--", flag, ": expected at least 1ms, got ", absl::FormatDuration(duration)));
    }
  }
  client::ClientOptions options;
  options.tenant = Tenant();
  options.timeout = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_timeout));
  options.connect_timeout = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_connect_timeout));
  options.transport = transport;
  options.client_name = "headwaterctl";
  options.on_notice = [](const std::string&) {};
  const std::string ca_certificate = FlagOr(FLAGS_ca_certificate, "HEADWATER_CA_CERTIFICATE");
  const std::string client_certificate = FlagOr(FLAGS_client_certificate, "HEADWATER_CLIENT_CERTIFICATE");
  const std::string client_key = FlagOr(FLAGS_client_key, "HEADWATER_CLIENT_KEY");
  if (client_certificate.empty() != client_key.empty()) {
    return UsageError("--client_certificate and --client_key: expected both, or neither");
  }
  if (!ca_certificate.empty() || !client_certificate.empty() || !client_key.empty()) {
    options.tls = client::TlsOptions{ca_certificate == "system" ? "" : ca_certificate, client_certificate, client_key, ""};
  }
  if (const std::string token_file = FlagOr(FLAGS_token_file, "HEADWATER_TOKEN_FILE"); !token_file.empty()) {
    HEADWATER_ASSIGN_OR_RETURN(options.token, ReadToken(token_file));
  }
  if (!session) options.session_lease = std::chrono::milliseconds(0);
  absl::StatusOr<client::Client> client = client::Client::Connect(ServerAddress(), options);
  // Nothing has been sent.
  if (absl::IsInvalidArgument(client.status())) return UsageError(InFlagsWords(std::string(client.status().message())));
  return client;
}

}  // namespace headwater::ctl
