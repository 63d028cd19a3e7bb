// Checks of headwaterd's flags, each by its name.
#ifndef HEADWATER_SERVER_MAIN_FLAG_CHECKS_H_
#define HEADWATER_SERVER_MAIN_FLAG_CHECKS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace headwater {

// InvalidArgument if the value is below `least`.
absl::Status CheckAtLeast(const char* flag, int64_t value, int64_t least);
// The same if the duration is not positive.
absl::Status CheckPositive(const char* flag, absl::Duration value);
// Permissions in octal.
absl::StatusOr<int> ParseMode(const char* flag, const std::string& text);

// Of paths; empty ones are not looked at. InvalidArgument with the path and the system's reason.
//
// A file that can be read.
absl::Status CheckReadable(const char* flag, const std::string& path);
// A file that can be written, whether or not it is there: it is replaced by one that is made beside it.
absl::Status CheckReplaceable(const char* flag, const std::string& path);

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_FLAG_CHECKS_H_
