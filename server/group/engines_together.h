// Makes the engines of the group's ranks in this process at the same time, because making one waits for the others.
#ifndef HEADWATER_SERVER_GROUP_ENGINES_TOGETHER_H_
#define HEADWATER_SERVER_GROUP_ENGINES_TOGETHER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/engine.h"

namespace headwater::group {

// Makes an engine out of one rank's options.
using EngineMaker = std::function<absl::StatusOr<std::unique_ptr<LossEngine>>(const EngineOptions&)>;
// Connects rank `index` of this process with the group. Fails soon after `aborted` has returned true.
using Connector = std::function<absl::StatusOr<std::shared_ptr<Communicator>>(size_t index, const std::function<bool()>& aborted)>;

struct FirstFailure {
  absl::Status status;  // OK: none
  size_t index = 0;
};

struct Patience {
  absl::Mutex& mutex;
  std::function<bool()> given_up;  // a condition that `mutex` guards
  absl::Duration timeout = absl::InfiniteDuration();
};

// Waits until `condition` is true, by the steady clock for at most `timeout`; false if it is not true then. `mutex` is held.
bool AwaitFor(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout);

// Runs work(0) to work(count - 1) at the same time, each on a thread of its own, and waits for all of them. Calls abort(why) once
// when the first one has failed, when the work is given up (kCancelled), or when it takes too long (DeadlineExceeded). Running work
// should fail soon then.
FirstFailure RunTogether(size_t count, absl::FunctionRef<absl::Status(size_t)> work,
                         absl::FunctionRef<void(const absl::Status&)> abort, const Patience& patience);

// The options of one of the group's ranks: rank 0's GPU is options.device_index, and the others' follow it.
EngineOptions OptionsOfRank(EngineOptions options, int32_t rank, int32_t world_size, const std::string& device_group_id);

struct EnginesTogether {
  std::vector<std::unique_ptr<LossEngine>> engines;  // by rank; none with a failure
  FirstFailure failure;
};
// Connects each rank of `options` and makes its engine, as RunTogether(). The first failure aborts all communicators. `connect` may
// be null: the options have communicators.
EnginesTogether MakeEnginesTogether(std::vector<EngineOptions> options, const Connector& connect, const EngineMaker& make,
                                    const Patience& patience);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_ENGINES_TOGETHER_H_
