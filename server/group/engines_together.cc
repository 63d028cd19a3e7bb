#include "server/group/engines_together.h"

#include <thread>
#include <utility>

#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::group {
namespace {

// The time in which work that is given up may still end by itself.
constexpr absl::Duration kLastMoment = absl::Seconds(1);

}  // namespace

bool AwaitFor(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout) {
  const absl::Time deadline = observability::MonotonicNow() + timeout;
  for (absl::Duration left = timeout; left > absl::ZeroDuration(); left = deadline - observability::MonotonicNow()) {
    if (mutex.AwaitWithTimeout(condition, left)) return true;
  }
  return condition.Eval();
}

FirstFailure RunTogether(size_t count, absl::FunctionRef<absl::Status(size_t)> work,
                         absl::FunctionRef<void(const absl::Status&)> abort, const Patience& patience) {
  absl::Mutex& mutex = patience.mutex;
  FirstFailure failure;
  size_t running = count;
  std::vector<std::thread> threads;
  for (size_t index = 0; index < count; ++index) {
    threads.emplace_back([&, index] {
      const absl::Status status = work(index);
      absl::MutexLock lock(&mutex);
      if (failure.status.ok() && !status.ok()) failure = {status, index};
      --running;
    });
  }
  const auto has_ended = [&] { return running == 0 || !failure.status.ok(); };
  const auto is_over = [&] { return has_ended() || patience.given_up(); };
  {
    absl::MutexLock lock(&mutex);
    if (!AwaitFor(mutex, absl::Condition(&is_over), patience.timeout)) {
      failure.status = absl::DeadlineExceededError("it has not become ready in time");
    } else if (!AwaitFor(mutex, absl::Condition(&has_ended), kLastMoment)) {
      failure.status = MakeError(ErrorReason::kCancelled, "the group has been given up");
    }
  }
  if (!failure.status.ok()) abort(failure.status);
  for (std::thread& thread : threads) thread.join();
  return failure;
}

EngineOptions OptionsOfRank(EngineOptions options, int32_t rank, int32_t world_size, const std::string& device_group_id) {
  options.device_index += rank;
  options.group.rank = rank;
  options.group.world_size = world_size;
  options.group.device_group_id = device_group_id;
  return options;
}

EnginesTogether MakeEnginesTogether(std::vector<EngineOptions> options, const Connector& connect, const EngineMaker& make,
                                    const Patience& patience) {
  EnginesTogether made{.engines = std::vector<std::unique_ptr<LossEngine>>(options.size()), .failure = {}};
  absl::Mutex mutex;
  absl::Status aborted;  // guarded by `mutex`, like the communicators of `options`
  const auto is_aborted = [&] {
    absl::MutexLock lock(&mutex);
    return !aborted.ok();
  };
  const auto make_one = [&](size_t index) -> absl::Status {
    if (connect != nullptr) {
      HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> communicator, connect(index, is_aborted));
      absl::MutexLock lock(&mutex);
      HEADWATER_RETURN_IF_ERROR(aborted);
      options[index].group.communicator = std::move(communicator);
    }
    HEADWATER_ASSIGN_OR_RETURN(made.engines[index], make(options[index]));
    return absl::OkStatus();
  };
  const auto abort = [&](const absl::Status& why) {
    absl::MutexLock lock(&mutex);
    aborted = why;
    for (const EngineOptions& one : options) {
      if (one.group.communicator != nullptr) one.group.communicator->Abort(why);
    }
  };
  made.failure = RunTogether(options.size(), make_one, abort, patience);
  if (!made.failure.status.ok()) made.engines.clear();
  return made;
}

}  // namespace headwater::group
