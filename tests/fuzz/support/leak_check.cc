#include "tests/fuzz/support/leak_check.h"

#include <sanitizer/lsan_interface.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <thread>

#include "tests/fuzz/support/check.h"

namespace headwater::fuzz {
namespace {

std::atomic<bool> turned_off{false};

}  // namespace
}  // namespace headwater::fuzz

// Not there without LeakSanitizer.
extern "C" int __lsan_do_recoverable_leak_check() __attribute__((weak));
// LeakSanitizer asks this before it looks.
extern "C" int __lsan_is_turned_off() { return headwater::fuzz::turned_off ? 1 : 0; }

namespace headwater::fuzz {

void NoteThreadNumber() {
  static ThreadNumbers numbers(getpid());
  if (numbers.came_round()) return;
  pid_t number = 0;
  std::thread([&number] { number = static_cast<pid_t>(syscall(SYS_gettid)); }).join();
  numbers.Add(number);
  if (!numbers.came_round()) return;
  turned_off = true;
  std::fprintf(stderr, "leaks are not looked for any more: the numbers of this process' threads have come round\n");
}

void CheckLeaks() {
  if (&__lsan_do_recoverable_leak_check != nullptr) FUZZ_CHECK(__lsan_do_recoverable_leak_check() == 0);
}

}  // namespace headwater::fuzz
