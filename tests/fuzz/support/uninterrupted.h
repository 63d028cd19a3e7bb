// System calls that libFuzzer's clock, which is a signal, may cut short.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_UNINTERRUPTED_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_UNINTERRUPTED_H_

#include <cerrno>

namespace headwater::fuzz {

// What `call` returns, once it is not a negative number because of a signal.
template <typename Call>
auto Uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_UNINTERRUPTED_H_
