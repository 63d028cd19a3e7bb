// A program in Python that does one kind of work on command, beside the benchmark: another process, as a trainer is one.
#ifndef HEADWATER_TESTS_BENCH_TRANSPORT_WORKER_H_
#define HEADWATER_TESTS_BENCH_TRANSPORT_WORKER_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace headwater::bench {

// Speaks lines: the worker says `ready`, or `unavailable: why`; then `run N` is answered `done` when N pieces of work are. Its
// standard error is this program's. Throws std::runtime_error if the worker ends or stays silent too long.
class Worker {
 public:
  // Starts it and waits for its first line.
  explicit Worker(const std::vector<std::string>& arguments);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  // Closes its input, at which it ends; kills it if it does not.
  ~Worker();

  // Empty if it is ready.
  const std::string& why_not() const { return why_not_; }
  // Does the work so many times.
  void Run(int count);
  // Sends a line and returns the answer's.
  std::string Ask(const std::string& line);

 private:
  std::string ReadLine();

  pid_t pid_ = -1;
  int input_ = -1;  // the worker's
  int output_ = -1;
  std::string read_;  // behind the last line
  std::string why_not_;
};

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_TRANSPORT_WORKER_H_
