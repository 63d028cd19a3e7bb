#include "server/scheduler/repeated_task.h"

#include <utility>

namespace headwater::scheduler {

RepeatedTask::RepeatedTask(absl::Duration interval, std::function<void()> round)
    : interval_(interval), round_(std::move(round)), thread_([this] { Run(); }) {}

RepeatedTask::~RepeatedTask() {
  pause_.Stop();
  thread_.join();
}

void RepeatedTask::Run() {
  while (!pause_.WaitFor(interval_)) round_();
}

}  // namespace headwater::scheduler
