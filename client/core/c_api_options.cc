#include "client/core/c_api_options.h"

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/core/link/error.h"

namespace headwater::client::internal {
namespace {

// Sets a field; false if the text is no value of it.
bool Parse(const std::string& value, std::string* field) {
  *field = value;
  return true;
}

bool Parse(const std::string& value, bool* field) {
  *field = value == "1";
  return *field || value == "0";
}

template <typename Number>
bool Parse(const std::string& value, Number* field) {
  return absl::SimpleAtoi(value, field);
}

bool Parse(const std::string& value, std::optional<int64_t>* field) { return absl::SimpleAtoi(value, &field->emplace()); }

bool Parse(const std::string& value, std::chrono::milliseconds* field) {
  int32_t number = 0;  // far from the overflow of any clock
  const bool is_number = absl::SimpleAtoi(value, &number);
  *field = std::chrono::milliseconds(number);
  return is_number;
}

bool Parse(const std::string& value, Transport* field) {
  for (const Transport transport : {Transport::kAuto, Transport::kGrpc, Transport::kSharedMemory, Transport::kCudaIpc}) {
    *field = transport;
    if (value == TransportName(transport)) return true;
  }
  return false;
}

using Setter = std::function<bool(const std::string& value, ClientOptions& options)>;

template <typename Field>
Setter Set(Field ClientOptions::*member) {
  return [member](const std::string& value, ClientOptions& options) { return Parse(value, &(options.*member)); };
}

template <typename Field>
Setter Set(Field RetryPolicy::*member) {
  return [member](const std::string& value, ClientOptions& options) { return Parse(value, &(options.retry.*member)); };
}

Setter Set(std::string TlsOptions::*member) {
  return [member](const std::string& value, ClientOptions& options) {
    if (!options.tls.has_value()) options.tls.emplace();
    *options.tls.*member = value;
    return !value.empty();
  };
}

// 0 contradicts what else is said of TLS.
bool SetTls(const std::string& value, ClientOptions& options) {
  bool wanted = false;
  if (!Parse(value, &wanted) || (!wanted && options.tls.has_value())) return false;
  if (wanted && !options.tls.has_value()) options.tls.emplace();
  return true;
}

const std::map<std::string, Setter>& Setters() {
  static const auto* const setters = new std::map<std::string, Setter>{
      {"transport", Set(&ClientOptions::transport)},
      {"stripes", Set(&ClientOptions::stripes)},
      {"chunk_bytes", Set(&ClientOptions::chunk_bytes)},
      {"max_message_bytes", Set(&ClientOptions::max_message_bytes)},
      {"connect_timeout_ms", Set(&ClientOptions::connect_timeout)},
      {"timeout_ms", Set(&ClientOptions::timeout)},
      {"session_lease_ms", Set(&ClientOptions::session_lease)},
      {"max_attempts", Set(&RetryPolicy::max_attempts)},
      {"initial_backoff_ms", Set(&RetryPolicy::initial_backoff)},
      {"max_backoff_ms", Set(&RetryPolicy::max_backoff)},
      {"replay_bytes", Set(&ClientOptions::replay_bytes)},
      {"replay_steps", Set(&ClientOptions::replay_steps)},
      {"client_name", Set(&ClientOptions::client_name)},
      {"tls", SetTls},
      {"ca_certificate", Set(&TlsOptions::ca_certificate)},
      {"client_certificate", Set(&TlsOptions::client_certificate)},
      {"client_key", Set(&TlsOptions::client_key)},
      {"server_name", Set(&TlsOptions::server_name)},
      {"token", Set(&ClientOptions::token)},
      {"traceparent", Set(&ClientOptions::traceparent)},
      {"allow_plaintext_token", Set(&ClientOptions::allow_plaintext_token)},
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
