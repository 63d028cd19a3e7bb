// Makes the engines of the group's ranks in this process at the same time, because making one waits for the others.
#ifndef HEADWATER_SERVER_GROUP_ENGINES_TOGETHER_H_
#define HEADWATER_SERVER_GROUP_ENGINES_TOGETHER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::group {

// Makes an engine out of one rank's options.
using EngineMaker = std::function<absl::StatusOr<std::unique_ptr<LossEngine>>(const EngineOptions&)>;

// The first failure among several pieces of work.
struct FirstFailure {
  absl::Status status;  // OK: none
  size_t index = 0;
};

// Runs work(0) to work(count - 1) at the same time, each on a thread of its own, and waits for all of them. Calls abort(why) once,
// on any thread, when the first one has failed, or when `given_up` has returned true (kCancelled). Running work should fail soon
// then. This thread calls `given_up` several times a second.
FirstFailure RunTogether(size_t count, absl::FunctionRef<absl::Status(size_t)> work,
                         absl::FunctionRef<void(const absl::Status&)> abort, absl::FunctionRef<bool()> given_up);

// make(options[i]) for all of `options`, as RunTogether(). The first failure aborts all communicators. `engines` receives all of
// them, or, with a failure, none.
FirstFailure MakeEnginesTogether(const std::vector<EngineOptions>& options, const EngineMaker& make,
                                 absl::FunctionRef<bool()> given_up, std::vector<std::unique_ptr<LossEngine>>* engines);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_ENGINES_TOGETHER_H_
