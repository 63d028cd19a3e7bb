#include "server/scheduler/repeated_task.h"

#include <new>
#include <utility>

namespace headwater::scheduler {

RepeatedTask::RepeatedTask(absl::Duration interval, std::function<void()> round)
    : interval_(interval), round_(std::move(round)), thread_([this] { Run(); }) {}

RepeatedTask::~RepeatedTask() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void RepeatedTask::Run() {
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_), interval_)) return;
    }
    try {
      round_();
    } catch (const std::bad_alloc&) {
    }
  }
}

}  // namespace headwater::scheduler
