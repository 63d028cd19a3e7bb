// The function that libFuzzer calls.
#include <csignal>

#include "tests/fuzz/support/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // libFuzzer's clock is a signal, which would cut system calls short.
  static const int restarted = [] {
    struct sigaction action {};
    sigaction(SIGALRM, nullptr, &action);
    action.sa_flags |= SA_RESTART;
    return sigaction(SIGALRM, &action, nullptr);
  }();
  static_cast<void>(restarted);
  headwater::fuzz::CheckInput({data, size});
  return 0;
}
