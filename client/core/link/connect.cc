#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/core/link/channel.h"
#include "client/core/link/error.h"
#include "client/core/link/security.h"
#include "client/core/link/target.h"
#include "headwater/kernels/return_if_error.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::client::internal {
namespace {

// Room in a message for everything but the chunk's data.
constexpr int64_t kMessageOverheadBytes = 64 << 10;
constexpr int64_t kMinMessageBytes = 128 << 10;
constexpr int64_t kMaxMessageBytes = int64_t{1} << 30;
constexpr int kMaxStripes = 64;
constexpr size_t kMostNameBytes = 128;
// The longest time that protobuf's Duration holds.
constexpr std::chrono::milliseconds kLongestLease = std::chrono::seconds(315'576'000'000);

// The wait is this part of connect_timeout where waiting rarely helps.
constexpr int kLastingFailureShare = 4;
constexpr std::chrono::milliseconds kOneMillisecond{1};

absl::Status CheckOption(bool valid, const char* field, int64_t actual, const std::string& expected) {
  if (valid) return absl::OkStatus();
  return MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument,
                        absl::StrCat("ClientOptions.", field, " is ", actual, ", expected ", expected),
                        {{"field", field}, {"expected", expected}, {"actual", absl::StrCat(actual)}});
}

absl::Status CheckOptions(const ClientOptions& options) {
  const int64_t max_chunk_bytes = options.max_message_bytes - kMessageOverheadBytes;
  const RetryPolicy& retry = options.retry;
  for (const absl::Status& status :
       {CheckOption(options.timeout.count() > 0, "timeout", options.timeout.count(), "milliseconds > 0"),
        CheckOption(options.connect_timeout.count() > 0, "connect_timeout", options.connect_timeout.count(), "milliseconds > 0"),
        CheckOption(options.max_message_bytes >= kMinMessageBytes && options.max_message_bytes <= kMaxMessageBytes,
                    "max_message_bytes", options.max_message_bytes,
                    absl::StrCat("[", kMinMessageBytes, ", ", kMaxMessageBytes, "]")),
        CheckOption(options.chunk_bytes >= 1 && options.chunk_bytes <= max_chunk_bytes, "chunk_bytes", options.chunk_bytes,
                    absl::StrCat("[1, ", max_chunk_bytes, "] (max_message_bytes - 64 KiB)")),
        CheckOption(retry.max_attempts >= 1, "retry.max_attempts", retry.max_attempts, ">= 1"),
        CheckOption(retry.initial_backoff.count() > 0, "retry.initial_backoff", retry.initial_backoff.count(), "milliseconds > 0"),
        CheckOption(retry.max_backoff >= retry.initial_backoff, "retry.max_backoff", retry.max_backoff.count(),
                    "milliseconds, at least initial_backoff"),
        CheckOption(options.session_lease.count() >= 0 && options.session_lease <= kLongestLease, "session_lease",
                    options.session_lease.count(), absl::StrCat("milliseconds in [0, ", kLongestLease.count(), "]")),
        CheckOption(options.client_name.size() <= kMostNameBytes, "client_name", static_cast<int64_t>(options.client_name.size()),
                    absl::StrCat("at most ", kMostNameBytes, " bytes")),
        CheckOption(options.replay_bytes >= 0, "replay_bytes", options.replay_bytes, ">= 0"),
        CheckOption(options.replay_steps.value_or(0) >= 0, "replay_steps", options.replay_steps.value_or(0), ">= 0"),
        CheckOption(options.stripes >= 1 && options.stripes <= kMaxStripes, "stripes", options.stripes,
                    absl::StrCat("[1, ", kMaxStripes, "]")),
        CheckOption(options.transport >= Transport::kAuto && options.transport <= Transport::kCudaIpc, "transport",
                    static_cast<int64_t>(options.transport), "a Transport")}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

bool IsOfTls(const std::string& reason) {
  return absl::StrContains(reason, "handshake") || absl::StrContains(reason, "verification check");
}

// How TLS may be the reason that `target` is not reached.
std::string TlsHint(const std::string& target, const std::string& reason, const ClientOptions& options) {
  const bool was_connected = reason.empty() || IsOfTls(reason) || absl::StrContains(reason, "Socket closed");
  if (IsUnix(target) || !was_connected) return "";
  if (!options.tls.has_value()) return "; a server that has TLS does not answer a client without it";
  if (std::string failure = TlsFailureOf(target, *options.tls); !failure.empty()) {
    return absl::StrCat("; the TLS handshake: ", failure, " (expected: a certificate for ", options.tls->server_name,
                        ", signed by an authority of tls.ca_certificate)");
  }
  return "; the server may ask for a client's certificate";
}

// gRPC's reason why a channel is in TRANSIENT_FAILURE, which only a call gets; nothing if the server is reached meanwhile.
std::optional<std::string> FailureOf(const std::shared_ptr<grpc::Channel>& channel, Deadline deadline) {
  grpc::ClientContext context;
  context.set_deadline(deadline);
  v1::ServerInfo answer;
  const grpc::Status status = v1::SessionService::NewStub(channel)->GetServerInfo(&context, v1::GetServerInfoRequest(), &answer);
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return "";
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE || !status.error_details().empty()) return std::nullopt;
  return status.error_message();
}

// Whether waiting rarely helps: no server that starts makes a name resolvable or a certificate right.
bool IsLasting(const std::string& reason) { return absl::StrContains(reason, "DNS resolution failed") || IsOfTls(reason); }

// Waits until the server is reached, or UNAVAILABLE with gRPC's reason.
absl::Status AwaitServer(const std::shared_ptr<grpc::Channel>& channel, const std::string& target, const ClientOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const Deadline deadline = DeadlineIn(options.connect_timeout);
  const Deadline lasting_deadline = DeadlineIn(std::max(options.connect_timeout / kLastingFailureShare, kOneMillisecond));
  std::string reason;
  while (std::chrono::system_clock::now() < (IsLasting(reason) ? lasting_deadline : deadline)) {
    const grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY) return absl::OkStatus();
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      std::optional<std::string> failure = FailureOf(channel, deadline);
      if (!failure.has_value()) return absl::OkStatus();
      if (!failure->empty()) reason = *std::move(failure);
    }
    channel->WaitForStateChange(state, IsLasting(reason) ? lasting_deadline : deadline);
  }
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  return absl::UnavailableError(absl::StrCat("no headwater server answers at ", target, " within ", waited.count(), " ms: ",
                                             reason.empty() ? "a connection was made or is being made, without an answer" : reason,
                                             TlsHint(target, reason, options)));
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& target, ClientOptions* options) {
  HEADWATER_RETURN_IF_ERROR(CheckTarget(target));
  HEADWATER_RETURN_IF_ERROR(CheckOptions(*options));
  HEADWATER_RETURN_IF_ERROR(PrepareSecurity(target, options));
  std::shared_ptr<grpc::Channel> channel = MakeChannel(target, *options);
  HEADWATER_RETURN_IF_ERROR(AwaitServer(channel, target, *options));
  return channel;
}

}  // namespace headwater::client::internal
