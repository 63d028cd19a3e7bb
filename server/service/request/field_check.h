// Field checks: how a request's field is refused. Every error has the field's path in the request message (`field`) and the
// expected and the actual value (`expected`, `actual`), in message and metadata.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_FIELD_CHECK_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_FIELD_CHECK_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"  // IWYU pragma: export

namespace headwater::service {

// The metadata key that becomes a RetryInfo: milliseconds to wait before the same call is worth another try, as a decimal number.
inline constexpr char kRetryAfterMsKey[] = "retryAfterMs";

// FieldError() of a limit, with the limit's name and value.
absl::Status LimitError(ErrorReason reason, const std::string& field, const std::string& expected, int64_t actual,
                        const char* limit, int64_t maximum);

// FieldError() of one reason: a value that is wrong by itself, one that does not go with other fields, and one that is not there.
absl::Status InvalidField(const std::string& field, const std::string& expected, const std::string& actual);
absl::Status InvalidCombination(const std::string& field, const std::string& expected, const std::string& actual);
absl::Status MissingField(const std::string& field, const std::string& expected);

// kFeatureNotBuilt for a field or RPC of the API that this build does not have. `feature` is a stable lower_snake_case name.
absl::Status FeatureNotBuilt(const std::string& field, const std::string& feature);

// kInvalidField unless minimum <= value <= maximum.
absl::Status CheckRange(const std::string& field, int64_t value, int64_t minimum, int64_t maximum);
// kInvalidField unless value >= minimum.
absl::Status CheckAtLeast(const std::string& field, int64_t value, int64_t minimum);
// The value, after CheckAtLeast().
absl::StatusOr<int64_t> AtLeast(const std::string& field, int64_t value, int64_t minimum);
// A number >= 0 that may be absent; kInvalidField if it is negative.
absl::StatusOr<std::optional<int64_t>> OptionalNumber(const std::string& field, bool present, int64_t value);

// kLimitExceeded if value is above the limit of that name.
absl::Status CheckLimit(const std::string& field, int64_t value, const char* limit, int64_t maximum);

// A factor, 1 if it is absent. kInvalidField unless it is finite as float32 too: it multiplies losses or gradients, which are
// float32.
absl::StatusOr<double> FactorOrOne(const std::string& field, bool present, double value);

// A value from a client as it may stand in a message: quoted, printable, at most 64 bytes of it.
std::string Quoted(const std::string& text);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_FIELD_CHECK_H_
