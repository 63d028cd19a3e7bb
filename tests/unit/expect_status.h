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

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_EXPECT_STATUS_H_
