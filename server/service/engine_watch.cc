#include "server/service/engine_watch.h"

#include <utility>

#include "absl/time/time.h"

namespace headwater::service {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(50);

}  // namespace

EngineWatch::EngineWatch(const LossEngine& engine, std::function<void(const absl::Status&)> on_lost)
    : engine_(engine), on_lost_(std::move(on_lost)), thread_([this] { Run(); }) {}

EngineWatch::~EngineWatch() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void EngineWatch::Check() {
  const absl::Status health = engine_.health();
  // A second caller waits here until the first one's `on_lost_` has run.
  if (!health.ok()) std::call_once(told_, on_lost_, health);
}

void EngineWatch::Run() {
  while (true) {
    Check();
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_), kInterval)) return;
  }
}

}  // namespace headwater::service
