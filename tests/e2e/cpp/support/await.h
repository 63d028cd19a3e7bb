// Waits for what comes sooner or later, however slow the machine is.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_AWAIT_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_AWAIT_H_

#include <chrono>
#include <functional>
#include <thread>

namespace headwater::e2e {

// Asks again and again until `holds` returns true; false if it does not within 60 s.
inline bool Await(const std::function<bool()>& holds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_AWAIT_H_
