// AwaitPoints: where the server's code waits for what is around it: the engine, a call's rows, the disk, the client. The process
// can be made to end at any of them.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_AWAIT_POINTS_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_AWAIT_POINTS_H_

namespace headwater::history {

// The end of the process, thrown through the server's code: what unwinds frees memory and releases locks, and then all but the
// files is thrown away.
struct ProcessEnd {};

// Not thread-safe.
class AwaitPoints {
 public:
  // Ends the process at the `number`-th point from now on; 0: at none.
  void EndAt(int number) {
    end_at_ = number;
    passed_ = 0;
  }
  void Pass() {
    if (++passed_ == end_at_) throw ProcessEnd();
  }
  // Since EndAt().
  int passed() const { return passed_; }

 private:
  int end_at_ = 0;
  int passed_ = 0;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_AWAIT_POINTS_H_
