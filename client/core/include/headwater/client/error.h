// The details of a failed call besides its canonical code and its message.
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
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace headwater::client {

// The machine-readable reason, for example `STEP_MISMATCH`. `CANCELLED` and `DEADLINE_EXCEEDED` also for calls that ended on this
// side. Empty for an OK status and for errors without a reason: a connection that could not be made or broke is UNAVAILABLE without
// one. Reasons may be added; handle an unknown one by its canonical code.
std::string ErrorReason(const absl::Status& status);

// The values that the message mentions, by lowerCamel key with the unit in the key: `field`, `expected`, `actual`, `openStep`,
// `requestedBytes`, ... Empty where there are none.
std::map<std::string, std::string> ErrorMetadata(const absl::Status& status);

// `RESOURCE_EXHAUSTED / STAGING_FULL: all 1 staging slots of ...`: code, reason and message in one line, for people. (A status that
// is printed by `<<` shows its payloads as bytes.) `OK` for an OK status.
std::string ToString(const absl::Status& status);

// The least time to wait before the same call can succeed, if the server gave one. It does for a full queue, and for STAGING_FULL
// where another session may free the slot.
std::optional<std::chrono::nanoseconds> RetryDelay(const absl::Status& status);

// The details of STEP_LOST for a head that came back from a checkpoint with a restarted server. Take the head (Head::Take()) to
// continue from there.
struct LostStep {
  int64_t restored_step = 0;  // the step that is open on the head now, and empty
  std::string checkpoint;  // where its weights come from. If `restored_step` is older than the trainer's, the trainer loads its own
                           // part of this checkpoint
  // Checkpoints for Head::Restore(), newest first, with the steps that they begin.
  std::vector<std::pair<std::string, int64_t>> checkpoints;
};

// Absent unless the reason is STEP_LOST and the head came back from a checkpoint (and not lost for good).
std::optional<LostStep> RestoredFrom(const absl::Status& status);

// The step that is open on the head, where the error names it (STEP_MISMATCH and others); absent otherwise.
std::optional<int64_t> OpenStep(const absl::Status& status);

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_ERROR_H_
