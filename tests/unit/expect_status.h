// Expectations about absl::Status and absl::StatusOr.
#ifndef HEADWATER_TESTS_UNIT_EXPECT_STATUS_H_
#define HEADWATER_TESTS_UNIT_EXPECT_STATUS_H_

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "headwater/kernels/error.h"

// Each takes a Status or a StatusOr.
#define EXPECT_OK(...)                                                                 \
  do {                                                                                 \
    const absl::Status expect_ok_status = ::headwater::testing::ToStatus(__VA_ARGS__); \
    EXPECT_TRUE(expect_ok_status.ok()) << expect_ok_status;                            \
  } while (false)
#define ASSERT_OK(...)                                                                 \
  do {                                                                                 \
    const absl::Status assert_ok_status = ::headwater::testing::ToStatus(__VA_ARGS__); \
    ASSERT_TRUE(assert_ok_status.ok()) << assert_ok_status;                            \
  } while (false)
#define EXPECT_REASON(expression, reason) \
  EXPECT_EQ(::headwater::testing::ReasonOf(expression), ::headwater::ErrorReasonName(::headwater::ErrorReason::reason))

// The error has this reason and, among its metadata, these: EXPECT_ERROR(call(), kStepMismatch, {"openStep", "5"}, {"step", "9"}).
#define EXPECT_ERROR(expression, reason, ...)                                                                                   \
  EXPECT_EQ(::headwater::testing::ErrorDifference(::headwater::testing::ToStatus(expression), ::headwater::ErrorReason::reason, \
                                                  {__VA_ARGS__}),                                                               \
            "")

// Declares a variable with the value of a StatusOr; an error fails the test and leaves the function.
#define ASSERT_OK_AND_ASSIGN(declaration, ...) \
  HEADWATER_ASSERT_AND_ASSIGN(HEADWATER_JOIN(result_of_line_, __LINE__), declaration, __VA_ARGS__)
#define HEADWATER_ASSERT_AND_ASSIGN(result, declaration, ...) \
  auto result = __VA_ARGS__;                                  \
  ASSERT_TRUE(result.ok()) << result.status();                \
  declaration = *std::move(result)
#define HEADWATER_JOIN(a, b) HEADWATER_JOIN_EXPANDED(a, b)
#define HEADWATER_JOIN_EXPANDED(a, b) a##b

namespace headwater::testing {

inline absl::Status ToStatus(const absl::Status& status) { return status; }
template <typename T>
absl::Status ToStatus(const absl::StatusOr<T>& result) {
  return result.status();
}
// The reason's name, or "OK".
template <typename T>
std::string ReasonOf(const T& result) {
  const absl::Status status = ToStatus(result);
  return status.ok() ? "OK" : ErrorReasonName(GetErrorReason(status));
}
// Empty if the error has this reason and these among its metadata.
inline std::string ErrorDifference(const absl::Status& status, ErrorReason reason, const ErrorMetadata& metadata) {
  if (!HasReason(status, reason)) return ReasonOf(status) + " instead of " + ErrorReasonName(reason);
  const ErrorMetadata actual = GetErrorMetadata(status);
  std::string difference;
  for (const auto& [key, value] : metadata) {
    const auto found = actual.find(key);
    const std::string is = found == actual.end() ? "missing" : found->second;
    if (is != value) difference += key + " is " + is + " instead of " + value + "; ";
  }
  return difference;
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_EXPECT_STATUS_H_
