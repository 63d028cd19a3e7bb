#include "server/main_signals.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <initializer_list>

#include "absl/base/attributes.h"

namespace headwater {
namespace {

constexpr uint64_t Bit(int signal_number) { return uint64_t{1} << (signal_number - 1); }

// Before any library's constructor: BLAS starts threads in one, which would take a signal that the main thread does not wait for,
// and with that end the process. So early there is no sanitizer either.
ABSL_ATTRIBUTE_NO_SANITIZE_ADDRESS ABSL_ATTRIBUTE_NO_SANITIZE_THREAD ABSL_ATTRIBUTE_NO_SANITIZE_UNDEFINED void BlockSignals() {
  const uint64_t mask = Bit(SIGTERM) | Bit(SIGINT) | Bit(SIGHUP) | Bit(kWakeSignal);
  syscall(SYS_rt_sigprocmask, SIG_BLOCK, &mask, nullptr, sizeof(mask));
}
__attribute__((section(".preinit_array"), used)) void (*const kBeforeConstructors)() = BlockSignals;

}  // namespace

sigset_t MainSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal_number : {SIGTERM, SIGINT, kWakeSignal}) sigaddset(&signals, signal_number);
  // Not if nohup has it ignored.
  struct sigaction hangup = {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  return signals;
}

bool IsAskedToEnd() {
  sigset_t pending;
  if (sigpending(&pending) != 0) return false;
  const sigset_t signals = MainSignals();
  for (const int signal_number : {SIGTERM, SIGINT, SIGHUP}) {
    if (sigismember(&pending, signal_number) == 1 && sigismember(&signals, signal_number) == 1) return true;
  }
  return false;
}

void WakeMainThread() { kill(getpid(), kWakeSignal); }

}  // namespace headwater
