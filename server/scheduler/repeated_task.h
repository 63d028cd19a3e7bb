// RepeatedTask: a function that is called again and again on a thread of its own.
#ifndef HEADWATER_SERVER_SCHEDULER_REPEATED_TASK_H_
#define HEADWATER_SERVER_SCHEDULER_REPEATED_TASK_H_

#include <functional>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "server/observability/pause.h"

namespace headwater::scheduler {

class RepeatedTask {
 public:
  // Calls `round` `interval` (> 0) from now, and again `interval` after each end of it.
  RepeatedTask(absl::Duration interval, std::function<void()> round)
      : round_(std::move(round)), thread_([this, interval] {
          while (!pause_.WaitFor(interval)) round_();
        }) {}
  // Waits for a running round; starts no further one.
  ~RepeatedTask() {
    pause_.Stop();
    thread_.join();
  }

 private:
  const std::function<void()> round_;
  observability::Pause pause_;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_REPEATED_TASK_H_
