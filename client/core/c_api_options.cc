#include "client/core/c_api_options.h"

#include <functional>
#include <map>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/core/link/error.h"

namespace headwater::client::internal {
namespace {

// Takes a value; false if it is none.
using Setter = std::function<bool(const std::string& value, ClientOptions& options)>;

template <typename Target>
Setter Integer(Target ClientOptions::*member) {
  return [member](const std::string& value, ClientOptions& options) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(value, &number) || number != static_cast<Target>(number)) return false;
    options.*member = static_cast<Target>(number);
    return true;
  };
}

bool ParseMilliseconds(const std::string& value, int64_t low, std::chrono::milliseconds* out) {
  int64_t number = 0;
  // Far from the overflow of any clock.
  if (!absl::SimpleAtoi(value, &number) || number < low || number > INT32_MAX) return false;
  *out = std::chrono::milliseconds(number);
  return true;
}

Setter Milliseconds(std::chrono::milliseconds ClientOptions::*member, int64_t low = 1) {
  return [=](const std::string& value, ClientOptions& options) { return ParseMilliseconds(value, low, &(options.*member)); };
}

Setter Backoff(std::chrono::milliseconds RetryPolicy::*member) {
  return [=](const std::string& value, ClientOptions& options) { return ParseMilliseconds(value, 1, &(options.retry.*member)); };
}

bool SetMaxAttempts(const std::string& value, ClientOptions& options) {
  return absl::SimpleAtoi(value, &options.retry.max_attempts);
}

bool SetReplaySteps(const std::string& value, ClientOptions& options) {
  return absl::SimpleAtoi(value, &options.replay_steps.emplace());
}

bool SetTransport(const std::string& value, ClientOptions& options) {
  for (const Transport transport : {Transport::kAuto, Transport::kGrpc, Transport::kSharedMemory, Transport::kCudaIpc}) {
    if (value != TransportName(transport)) continue;
    options.transport = transport;
    return true;
  }
  return false;
}

bool SetClientName(const std::string& value, ClientOptions& options) {
  options.client_name = value;
  return value.size() <= 128;
}

bool SetBool(const std::string& value, bool* out) {
  if (value != "0" && value != "1") return false;
  *out = value == "1";
  return true;
}

Setter Tls(std::string TlsOptions::*member) {
  return [member](const std::string& value, ClientOptions& options) {
    if (!options.tls.has_value()) options.tls.emplace();
    *options.tls.*member = value;
    return !value.empty();
  };
}

bool SetTls(const std::string& value, ClientOptions& options) {
  bool wanted = false;
  if (!SetBool(value, &wanted) || (!wanted && options.tls.has_value())) return false;
  if (wanted && !options.tls.has_value()) options.tls.emplace();
  return true;
}

// Whatever is wrong with it is found later, and told without quoting it.
bool SetToken(const std::string& value, ClientOptions& options) {
  options.token = value;
  return true;
}

bool SetTraceparent(const std::string& value, ClientOptions& options) {
  options.traceparent = value;
  return true;
}

const std::map<std::string, Setter>& Setters() {
  static const auto* const setters = new std::map<std::string, Setter>{
      {"transport", SetTransport},
      {"stripes", Integer(&ClientOptions::stripes)},
      {"chunk_bytes", Integer(&ClientOptions::chunk_bytes)},
      {"max_message_bytes", Integer(&ClientOptions::max_message_bytes)},
      {"connect_timeout_ms", Milliseconds(&ClientOptions::connect_timeout)},
      {"timeout_ms", Milliseconds(&ClientOptions::timeout)},
      {"session_lease_ms", Milliseconds(&ClientOptions::session_lease, 0)},
      {"max_attempts", SetMaxAttempts},
      {"initial_backoff_ms", Backoff(&RetryPolicy::initial_backoff)},
      {"max_backoff_ms", Backoff(&RetryPolicy::max_backoff)},
      {"replay_bytes", Integer(&ClientOptions::replay_bytes)},
      {"replay_steps", SetReplaySteps},
      {"client_name", SetClientName},
      {"tls", SetTls},
      {"ca_certificate", Tls(&TlsOptions::ca_certificate)},
      {"client_certificate", Tls(&TlsOptions::client_certificate)},
      {"client_key", Tls(&TlsOptions::client_key)},
      {"server_name", Tls(&TlsOptions::server_name)},
      {"token", SetToken},
      {"traceparent", SetTraceparent},
      {"allow_plaintext_token",
       [](const std::string& value, ClientOptions& options) { return SetBool(value, &options.allow_plaintext_token); }},
  };
  return *setters;
}

absl::Status InvalidOption(const std::string& field, const std::string& message) {
  return MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument, message, {{"field", field}});
}

}  // namespace

absl::StatusOr<ClientOptions> ParseClientOptions(const std::string& text) {
  ClientOptions options;
  options.client_name = "headwater-c";
  // Whoever is above says it in its own way.
  options.on_notice = [](const std::string&) {};
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipWhitespace())) {
    const std::pair<std::string, std::string> option = absl::StrSplit(absl::StripAsciiWhitespace(line), absl::MaxSplits('=', 1));
    const auto setter = Setters().find(option.first);
    if (setter == Setters().end()) return InvalidOption(option.first, absl::StrCat("there is no option ", option.first));
    if (!setter->second(option.second, options)) {
      return InvalidOption(option.first, absl::StrCat("option ", option.first, " cannot be ", option.second));
    }
  }
  return options;
}

}  // namespace headwater::client::internal
