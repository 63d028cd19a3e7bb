#include "client/core/link/error.h"

#include <chrono>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/optional.h"
#include "client/core/link/duration.h"
#include "headwater/client/error.h"
#include "proto/headwater/v1/error_metadata.h"

namespace headwater::client {
namespace {

constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kRetryInfoUrl[] = "type.googleapis.com/google.rpc.RetryInfo";

template <typename Message>
std::optional<Message> PayloadOf(const absl::Status& status, const char* url) {
  const absl::optional<absl::Cord> payload = status.GetPayload(url);
  Message message;
  if (!payload.has_value() || !message.ParseFromString(std::string(*payload))) return std::nullopt;
  return message;
}

std::optional<int64_t> StepIn(const std::map<std::string, std::string>& metadata, const char* key) {
  const auto entry = metadata.find(key);
  int64_t step = 0;
  if (entry == metadata.end() || !absl::SimpleAtoi(entry->second, &step)) return std::nullopt;
  return step;
}

}  // namespace

std::string ErrorReason(const absl::Status& status) {
  const auto info = PayloadOf<v1::ErrorInfo>(status, kErrorInfoUrl);
  return info.has_value() ? info->reason() : std::string();
}

std::map<std::string, std::string> ErrorMetadata(const absl::Status& status) {
  const auto info = PayloadOf<v1::ErrorInfo>(status, kErrorInfoUrl);
  if (!info.has_value()) return {};
  return {info->metadata().begin(), info->metadata().end()};
}

std::string ToString(const absl::Status& status) {
  if (status.ok()) return "OK";
  const std::string reason = ErrorReason(status);
  return absl::StrCat(absl::StatusCodeToString(status.code()), reason.empty() ? "" : " / ", reason, ": ",
                      std::string(status.message()));
}

std::optional<std::chrono::nanoseconds> RetryDelay(const absl::Status& status) {
  const auto info = PayloadOf<v1::RetryInfo>(status, kRetryInfoUrl);
  if (!info.has_value()) return std::nullopt;
  return internal::FromProto(info->retry_delay());
}

std::optional<LostStep> RestoredFrom(const absl::Status& status) {
  if (ErrorReason(status) != "STEP_LOST") return std::nullopt;
  const std::map<std::string, std::string> metadata = ErrorMetadata(status);
  const std::optional<int64_t> step = StepIn(metadata, "restoredStep");
  const auto checkpoint = metadata.find("checkpoint");
  if (!step.has_value() || checkpoint == metadata.end()) return std::nullopt;
  LostStep lost{*step, checkpoint->second, {}};
  if (const auto listed = metadata.find("checkpoints"); listed != metadata.end()) {
    for (const absl::string_view pair : absl::StrSplit(listed->second, ',')) {
      const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(pair, absl::MaxSplits('=', 1));
      int64_t begins = 0;
      if (absl::SimpleAtoi(parts.second, &begins)) lost.checkpoints.emplace_back(std::string(parts.first), begins);
    }
  }
  return lost;
}

std::optional<int64_t> OpenStep(const absl::Status& status) { return StepIn(ErrorMetadata(status), "openStep"); }

namespace internal {

absl::Status FromGrpcStatus(const grpc::Status& status, const std::string& target) {
  // Both enumerations are the canonical codes.
  const absl::StatusCode code = static_cast<absl::StatusCode>(static_cast<int>(status.error_code()));
  v1::RpcStatus details;
  const bool has_details = !status.error_details().empty() && details.ParseFromString(status.error_details());
  if (!has_details) {
    if (code == absl::StatusCode::kUnavailable) {
      return absl::UnavailableError(absl::StrCat("the connection to ", target, " failed: ", status.error_message()));
    }
    if (code == absl::StatusCode::kCancelled) {
      return MakeLocalError(v1::ERROR_REASON_CANCELLED, code, absl::StrCat("the call was cancelled: ", status.error_message()));
    }
    if (code == absl::StatusCode::kDeadlineExceeded) {
      return MakeLocalError(v1::ERROR_REASON_DEADLINE_EXCEEDED, code,
                            absl::StrCat("the deadline passed before ", target, " answered: ", status.error_message()));
    }
    return absl::Status(code, status.error_message());
  }
  absl::Status result(code, status.error_message());
  for (const google::protobuf::Any& detail : details.details()) {
    if (detail.type_url() == kErrorInfoUrl || detail.type_url() == kRetryInfoUrl) {
      result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
    }
  }
  return result;
}

absl::Status MakeLocalError(v1::ErrorReason reason, absl::StatusCode code, const std::string& message,
                            const std::map<std::string, std::string>& metadata) {
  constexpr size_t kPrefixLength = sizeof("ERROR_REASON_") - 1;
  v1::ErrorInfo info;
  info.set_reason(v1::ErrorReason_Name(reason).substr(kPrefixLength));
  info.set_domain("headwater");
  v1::SetErrorMetadata(metadata, info.mutable_metadata());
  absl::Status status(code, message);
  status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

absl::Status TransportUnavailable(const std::string& why) {
  return MakeLocalError(v1::ERROR_REASON_TRANSPORT_UNAVAILABLE, absl::StatusCode::kFailedPrecondition, why);
}

absl::Status MakeAnswerError(const std::string& message) {
  return MakeLocalError(v1::ERROR_REASON_INTERNAL, absl::StatusCode::kInternal,
                        absl::StrCat("the server's answer does not follow the protocol: ", message));
}

}  // namespace internal
}  // namespace headwater::client
