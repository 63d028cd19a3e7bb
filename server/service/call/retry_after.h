// The metadata key that becomes a RetryInfo.
#ifndef HEADWATER_SERVER_SERVICE_CALL_RETRY_AFTER_H_
#define HEADWATER_SERVER_SERVICE_CALL_RETRY_AFTER_H_

namespace headwater::service {

// Milliseconds to wait before the same call is worth another try, as a decimal number. The work queue writes the same key.
inline constexpr char kRetryAfterMsKey[] = "retryAfterMs";

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CALL_RETRY_AFTER_H_
