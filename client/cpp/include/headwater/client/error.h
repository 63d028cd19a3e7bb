// What a failed call says beside its canonical code and its message.
//
//   absl::StatusOr<LossResult> result = future.Get();
//   if (!result.ok() && ErrorReason(result.status()) == "STEP_MISMATCH") {
//     const std::string open_step = ErrorMetadata(result.status())["openStep"];
//   }
//
// Switch on the reason, never on the text. docs/errors.md lists every reason with its cause and remedy.
#ifndef HEADWATER_CLIENT_ERROR_H_
#define HEADWATER_CLIENT_ERROR_H_

#include <chrono>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace headwater::client {

// The machine-readable reason, for example `STEP_MISMATCH`. `CANCELLED` and `DEADLINE_EXCEEDED` also for calls that ended on this
// side. Empty for an OK status and where nobody gave one: a connection that could not be made or broke is UNAVAILABLE without a
// reason. Reasons may be added; handle an unknown one by its canonical code.
std::string ErrorReason(const absl::Status& status);

// The values that the message mentions, by lowerCamel key with the unit in the key: `field`, `expected`, `actual`, `openStep`,
// `requestedBytes`, ... Empty where there are none.
std::map<std::string, std::string> ErrorMetadata(const absl::Status& status);

// How long to wait at least before the same call can succeed; absent unless the server said so (a full queue).
std::optional<std::chrono::nanoseconds> RetryDelay(const absl::Status& status);

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_ERROR_H_
