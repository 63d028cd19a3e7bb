// What a fuzz target does when the product breaks a promise: says so and ends the process, which libFuzzer, and the test that runs
// the corpora, take for a finding.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_CHECK_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "headwater/kernels/error.h"

namespace headwater::fuzz {

[[noreturn]] inline void Fail(const char* file, int line, const char* what, const std::string& detail) {
  std::fprintf(stderr, "%s:%d: broken promise: %s%s%s\n", file, line, what, detail.empty() ? "" : "; ", detail.c_str());
  std::fflush(stderr);
  std::abort();
}

// FUZZ_CHECK(condition) or FUZZ_CHECK(condition, detail), where `detail` is a std::string that is made only on failure.
#define FUZZ_CHECK(condition, ...)                                                       \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      ::headwater::fuzz::Fail(__FILE__, __LINE__, #condition, std::string(__VA_ARGS__)); \
    }                                                                                    \
  } while (false)

// A refusal as docs/errors.md promises it: with a reason, in one printable line that is not endless, and never for a fault of ours.
inline void CheckRefusal(const absl::Status& status) {
  FUZZ_CHECK(!status.ok());
  FUZZ_CHECK(GetErrorReason(status) != ErrorReason::kInternal, status.ToString());
  FUZZ_CHECK(status.code() == ErrorReasonCode(GetErrorReason(status)), status.ToString());
  FUZZ_CHECK(!status.message().empty() && status.message().size() <= 4096, status.ToString());
  for (const char c : status.message()) FUZZ_CHECK(c >= 0x20 && c < 0x7f, status.ToString());
  for (const auto& [key, value] : GetErrorMetadata(status)) {
    FUZZ_CHECK(!key.empty() && value.size() <= 4096, key);
    for (const char c : value) FUZZ_CHECK(c >= 0x20 && c < 0x7f, key + ": " + value);
  }
}

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_CHECK_H_
