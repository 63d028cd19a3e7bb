// StallClock: an engine's observer that detects when the engine is stuck (docs/adr/0018-limits.md). The engine is stuck when a call
// is in it and there is no progress for `stall_timeout`. Progress is the end of a call, rows asked for or handed out (RowFlow), or
// a rise of LossEngine::progress(). From then on health() fails as if the device were lost. Each look (health() is called every 50
// ms) counts at most a second: an hour for which the process was stopped does not count.
#ifndef HEADWATER_SERVER_SERVICE_STALL_CLOCK_H_
#define HEADWATER_SERVER_SERVICE_STALL_CLOCK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::service {

class StallClock final : public EngineObserver {
 public:
  // `stall_timeout` > 0. `clock` never goes back.
  explicit StallClock(absl::Duration stall_timeout, std::function<absl::Time()> clock = observability::MonotonicNow);

  uint64_t BeginCall(const char* name) override;
  void EndCall(uint64_t call) override;
  void LeaveFlow() override;
  // kEngineFailed once the engine is stuck, for good; that moment is logged, with the oldest call and its head.
  absl::Status Check(int64_t progress) override;

 private:
  struct Call {
    const char* work;
    std::string method;
    std::string request_id;
    std::string head;
  };

  const absl::Duration stall_timeout_;
  const std::function<absl::Time()> clock_;
  absl::Mutex mutex_;
  std::map<uint64_t, Call> calls_ ABSL_GUARDED_BY(mutex_);  // those in the engine, in the order in which they came
  uint64_t next_call_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t events_ ABSL_GUARDED_BY(mutex_) = 0;       // calls that have ended, and visits to a flow
  int64_t seen_events_ ABSL_GUARDED_BY(mutex_) = 0;  // at the last look, like the next two
  int64_t seen_progress_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time last_look_ ABSL_GUARDED_BY(mutex_);
  absl::Duration still_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();  // since the last event
  absl::Status stuck_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_STALL_CLOCK_H_
