// EngineWatch: notices when the engine's device is lost (LossEngine::health()), whoever meets the failure first.
#ifndef HEADWATER_SERVER_SERVICE_ENGINE_WATCH_H_
#define HEADWATER_SERVER_SERVICE_ENGINE_WATCH_H_

#include <functional>
#include <mutex>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"

namespace headwater::service {

class EngineWatch {
 public:
  // Looks at `engine`, which must outlive this, every 50 ms. `on_lost` is called once, with the engine's health, on the watch's
  // thread or on one that calls Check(); it must not call Check() or destroy this.
  EngineWatch(const LossEngine& engine, std::function<void(const absl::Status&)> on_lost);
  ~EngineWatch();
  EngineWatch(const EngineWatch&) = delete;
  EngineWatch& operator=(const EngineWatch&) = delete;

  // Looks now: when it returns and the device is lost, `on_lost` has run. Any thread.
  void Check();

 private:
  void Run();

  const LossEngine& engine_;
  const std::function<void(const absl::Status&)> on_lost_;
  std::once_flag told_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ENGINE_WATCH_H_
