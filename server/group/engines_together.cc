#include "server/group/engines_together.h"

#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"

namespace headwater::group {
namespace {

constexpr absl::Duration kFailureLook = absl::Milliseconds(50);

}  // namespace

FirstFailure RunTogether(size_t count, absl::FunctionRef<absl::Status(size_t)> work,
                         absl::FunctionRef<void(const absl::Status&)> abort, absl::FunctionRef<bool()> given_up) {
  absl::Mutex mutex;
  FirstFailure failure;
  size_t running = count;
  const auto fail = [&](const absl::Status& status, size_t index) {
    {
      absl::MutexLock lock(&mutex);
      if (!failure.status.ok()) return;
      failure = {status, index};
    }
    abort(status);
  };
  std::vector<std::thread> threads;
  for (size_t index = 0; index < count; ++index) {
    threads.emplace_back([&, index] {
      if (const absl::Status status = work(index); !status.ok()) fail(status, index);
      absl::MutexLock lock(&mutex);
      --running;
    });
  }
  const auto have_ended = [&running] { return running == 0; };
  const auto await_all = [&] {
    absl::MutexLock lock(&mutex);
    return mutex.AwaitWithTimeout(absl::Condition(&have_ended), kFailureLook);
  };
  while (!await_all()) {
    if (given_up()) fail(MakeError(ErrorReason::kCancelled, "the group has been given up"), 0);
  }
  for (std::thread& thread : threads) thread.join();
  return failure;
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
