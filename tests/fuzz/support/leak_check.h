// Looks for leaks while the process goes on; and when not to.
//
// LeakSanitizer finds a living thread's stack by the number that the system gave the thread, and takes the first thread of this
// process that ever had it, one that has ended and was joined as well as another (so in LLVM 14 and in GCC 12). Numbers come round,
// for all processes of the machine together: after 32768 threads by default (/proc/sys/kernel/pid_max). From then on what only such
// a thread's stack refers to, as a thread's record of itself, is told as leaked.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_LEAK_CHECK_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_LEAK_CHECK_H_

#include <sys/types.h>

namespace headwater::fuzz {

// Whether a process' threads can have numbers that earlier ones of its had.
class ThreadNumbers {
 public:
  // `first`: no thread of the process had a lower one before numbers began anew. Its own number is one.
  explicit ThreadNumbers(pid_t first) : first_(first), last_(first) {}

  // A thread that was made just now has `number`. To be called often enough to see that numbers began anew.
  void Add(pid_t number) {
    began_anew_ = began_anew_ || number < last_;
    came_round_ = came_round_ || (began_anew_ && number >= first_);
    last_ = number;
  }
  bool came_round() const { return came_round_; }

 private:
  pid_t first_;
  pid_t last_;
  bool began_anew_ = false;
  bool came_round_ = false;
};

// Learns the number of a thread that it makes. When numbers have come round, says so once and turns LeakSanitizer off, at the
// process' end too. One thread.
void NoteThreadNumber();

// Fails if anything has leaked that LeakSanitizer can tell.
void CheckLeaks();

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_LEAK_CHECK_H_
