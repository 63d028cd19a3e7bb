// The lines that gRPC logs by itself, as lines of the server's own log.
#include <grpc/support/log.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/guard/line_budget.h"
#include "server/observability/logging.h"
#include "server/observability/metrics.h"
#include "server/service/server.h"

namespace headwater::service {
namespace {

using observability::LogField;
using observability::LogLevel;

// Apart from FailedCallLines(): strangers' handshakes must not hide calls that fail, nor these the handshakes.
guard::LineBudget& GrpcLines() {
  static auto* const budget = new guard::LineBudget(/*a_second=*/10, /*at_once=*/100);
  return *budget;
}

// By gRPC's severity.
constexpr LogLevel kLevels[] = {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kError};

void TakeLine(gpr_log_func_args* line) {
  const absl::string_view message = line->message;
  const absl::string_view path = line->file;
  const absl::string_view file = path.substr(path.rfind('/') + 1);
  // OpenSSL's refusal of a handshake. gRPC has no other place that reports one.
  const bool handshake = file == "ssl_transport_security.cc" && absl::StartsWith(message, "Handshake failed");
  if (handshake) observability::Metrics::CountTlsHandshakeFailure();
  std::optional<int64_t> left_out = GrpcLines().Take();
  if (absl::StartsWith(message, "assertion failed")) left_out = left_out.value_or(0);  // the last line of a process that aborts
  if (!left_out.has_value()) return;
  std::vector<LogField> fields = {{"message", std::string(message)}, {"source", absl::StrCat(file, ":", line->line)}};
  if (*left_out > 0) fields.emplace_back("lines_left_out", *left_out);
  observability::Log(handshake ? LogLevel::kWarning : kLevels[line->severity], handshake ? "tls_handshake_failed" : "grpc", fields);
}

}  // namespace

void TakeGrpcLog() { gpr_set_log_function(&TakeLine); }

}  // namespace headwater::service
