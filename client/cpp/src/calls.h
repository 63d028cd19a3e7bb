// Calls of the core with messages of known types.
#ifndef HEADWATER_CLIENT_SRC_CALLS_H_
#define HEADWATER_CLIENT_SRC_CALLS_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/core.h"
#include "headwater/client/future.h"
#include "headwater/client/types.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {

Deadline DeadlineOf(const Core& core, const CallOptions& options);

std::vector<int64_t> ShapeOf(const HeadSpec& spec, HeadTensor tensor);
// RESOURCE_EXHAUSTED.
absl::StatusOr<TensorBuffer> MakeBuffer(DataType data_type, const std::vector<int64_t>& shape);
// A whole tensor as the rows that a call sends or receives.
RowsView RowsOf(const TensorView& values);
RowsView RowsOf(TensorBuffer& buffer);
// INVALID_ARGUMENT if reading the elements would leave the caller's memory.
absl::Status CheckElements(const std::string& field, const TensorView& values);

// Makes the call of the message's method and waits for its answer, which is a `Result`.
template <typename Result, typename Message>
absl::StatusOr<Result> Run(Core& core, Message message, Deadline deadline, CallMemory memory = {}) {
  HEADWATER_ASSIGN_OR_RETURN(
      Answer answer, core.Run(core.MakeRequest(std::make_unique<Message>(std::move(message)), std::move(memory), deadline)));
  return std::move(static_cast<Result&>(*answer.message));
}
template <typename Result, typename Message>
absl::StatusOr<Result> Run(Core& core, Message message, const CallOptions& options, CallMemory memory = {}) {
  return Run<Result>(core, std::move(message), DeadlineOf(core, options), std::move(memory));
}

// Starts a call whose result is convert(answer).
template <typename Result, typename Message, typename Convert>
Future<Result> Start(const std::shared_ptr<Core>& core, Message message, const CallOptions& options, CallMemory memory,
                     Convert convert) {
  auto state = std::make_shared<FutureState<Result>>();
  // `read` may hold the last reference to the core, which must not be dropped on one of the core's own threads. It is released
  // before the result is there.
  auto finish = [state, read = std::make_optional(std::move(convert))](absl::StatusOr<Answer> answer) mutable {
    absl::StatusOr<Result> result;
    if (!answer.ok()) {
      result = answer.status();
    } else {
      absl::Status converted = WithMemoryFor(static_cast<int64_t>(answer->message->ByteSizeLong()), "a result", [&] {
        result = (*read)(*answer);
        return absl::OkStatus();
      });
      if (!converted.ok()) result = std::move(converted);
    }
    read.reset();
    state->Set(std::move(result));
  };
  const std::shared_ptr<Call> call =
      core->NewCall(core->MakeRequest(std::make_unique<Message>(std::move(message)), std::move(memory), DeadlineOf(*core, options)),
                    std::move(finish));
  state->Keep(call, [raw = call.get()] { raw->Cancel(); });
  call->Start();
  return Future<Result>(state);
}

// A future that has ended.
template <typename Result>
Future<Result> Failed(absl::Status status) {
  auto state = std::make_shared<FutureState<Result>>();
  state->Set(std::move(status));
  return Future<Result>(state);
}

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_CALLS_H_
