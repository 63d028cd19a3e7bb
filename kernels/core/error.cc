#include "headwater/kernels/error.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace headwater {
namespace {

constexpr absl::string_view kReasonUrl = "headwater/reason";
constexpr absl::string_view kMetadataUrlPrefix = "headwater/metadata/";

struct ReasonEntry {
  const char* name;
  absl::StatusCode code;
};

constexpr ReasonEntry kReasons[] = {
#define HEADWATER_REASON_ENTRY(enumerator, name, code) {#name, absl::StatusCode::code},
    HEADWATER_ERROR_REASONS(HEADWATER_REASON_ENTRY)
#undef HEADWATER_REASON_ENTRY
};

}  // namespace

const char* ErrorReasonName(ErrorReason reason) { return kReasons[static_cast<int>(reason)].name; }

absl::StatusCode ErrorReasonCode(ErrorReason reason) { return kReasons[static_cast<int>(reason)].code; }

absl::Status MakeError(ErrorReason reason, const std::string& message, ErrorMetadata metadata) {
  absl::Status status(ErrorReasonCode(reason), message);
  status.SetPayload(kReasonUrl, absl::Cord(std::to_string(static_cast<int>(reason))));
  for (const auto& [key, value] : metadata) {
    status.SetPayload(std::string(kMetadataUrlPrefix) + key, absl::Cord(value));
  }
  return status;
}

absl::Status FieldError(ErrorReason reason, const std::string& field, const std::string& expected, const std::string& actual) {
  return MakeError(reason, field + ": expected " + expected + ", got " + actual,
                   {{"field", field}, {"expected", expected}, {"actual", actual}});
}

ErrorReason GetErrorReason(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? static_cast<ErrorReason>(std::stoi(std::string(*payload))) : ErrorReason::kInternal;
}

ErrorMetadata GetErrorMetadata(const absl::Status& status) {
  ErrorMetadata metadata;
  status.ForEachPayload([&metadata](absl::string_view url, const absl::Cord& payload) {
    if (url.substr(0, kMetadataUrlPrefix.size()) == kMetadataUrlPrefix) {
      metadata[std::string(url.substr(kMetadataUrlPrefix.size()))] = std::string(payload);
    }
  });
  return metadata;
}

bool HasReason(const absl::Status& status, ErrorReason reason) { return !status.ok() && GetErrorReason(status) == reason; }

}  // namespace headwater
