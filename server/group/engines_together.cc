#include "server/group/engines_together.h"

#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"

namespace headwater::group {
namespace {

constexpr absl::Duration kFailureLook = absl::Milliseconds(50);

// What is known of work on several threads.
class Progress {
 public:
  explicit Progress(size_t count) : running_(count) {}

  // Whether this is the first failure.
  bool Fail(const absl::Status& status, size_t index) {
    absl::MutexLock lock(&mutex_);
    if (!failure_.status.ok()) return false;
    failure_ = {status, index};
    return true;
  }
  void End() {
    absl::MutexLock lock(&mutex_);
    --running_;
  }
  // Whether all have ended; waits for a moment.
  bool AwaitAll() {
    const auto all = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return running_ == 0; };
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&all), kFailureLook);
  }
  FirstFailure failure() const {
    absl::MutexLock lock(&mutex_);
    return failure_;
  }

 private:
  mutable absl::Mutex mutex_;
  size_t running_ ABSL_GUARDED_BY(mutex_);
  FirstFailure failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

FirstFailure RunTogether(size_t count, absl::FunctionRef<absl::Status(size_t)> work,
                         absl::FunctionRef<void(const absl::Status&)> abort, absl::FunctionRef<bool()> given_up) {
  Progress progress(count);
  std::vector<std::thread> threads;
  for (size_t index = 0; index < count; ++index) {
    threads.emplace_back([&progress, work, abort, index] {
      const absl::Status status = work(index);
      if (!status.ok() && progress.Fail(status, index)) abort(status);
      progress.End();
    });
  }
  while (!progress.AwaitAll()) {
    if (!given_up()) continue;
    const absl::Status cancelled = MakeError(ErrorReason::kCancelled, "the group has been given up");
    if (progress.Fail(cancelled, 0)) abort(cancelled);
  }
  for (std::thread& thread : threads) thread.join();
  return progress.failure();
}

FirstFailure MakeEnginesTogether(const std::vector<EngineOptions>& options, const EngineMaker& make,
                                 absl::FunctionRef<bool()> given_up, std::vector<std::unique_ptr<LossEngine>>* engines) {
  std::vector<std::unique_ptr<LossEngine>> made(options.size());
  FirstFailure failure = RunTogether(
      options.size(),
      [&](size_t index) {
        absl::StatusOr<std::unique_ptr<LossEngine>> engine = make(options[index]);
        if (engine.ok()) made[index] = *std::move(engine);
        return engine.status();
      },
      [&](const absl::Status& why) {
        for (const EngineOptions& one : options) one.group.communicator->Abort(why);
      },
      given_up);
  if (failure.status.ok()) *engines = std::move(made);
  return failure;
}

}  // namespace headwater::group
