// EngineWatch: notices when the engine's device is lost (LossEngine::health()), by itself or for a caller.
#ifndef HEADWATER_SERVER_SERVICE_ENGINE_WATCH_H_
#define HEADWATER_SERVER_SERVICE_ENGINE_WATCH_H_

#include <functional>
#include <mutex>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"
#include "server/scheduler/repeated_task.h"

namespace headwater::service {

class EngineWatch {
 public:
  // Looks at `engine`, which must outlive this, every 50 ms. `on_lost` is called once, with the engine's health, on the watch's
  // thread or in Check(). It must not call Check() or destroy this.
  EngineWatch(const LossEngine& engine, std::function<void(const absl::Status&)> on_lost);
  EngineWatch(const EngineWatch&) = delete;
  EngineWatch& operator=(const EngineWatch&) = delete;

  // Looks now: when it returns and the device is lost, `on_lost` has run. Any thread.
  void Check();

 private:
  const LossEngine& engine_;
  const std::function<void(const absl::Status&)> on_lost_;
  std::once_flag told_;
  scheduler::RepeatedTask check_;  // last: it uses the members above
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ENGINE_WATCH_H_
