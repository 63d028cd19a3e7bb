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

#define HEADWATER_HEADS "/headwater.v1.HeadService/"
#define HEADWATER_LOSS "/headwater.v1.LossService/"

Deadline DeadlineOf(const Core& core, const CallOptions& options);

std::vector<int64_t> ShapeOf(const HeadSpec& spec, HeadTensor tensor);
// RESOURCE_EXHAUSTED.
absl::StatusOr<TensorBuffer> MakeBuffer(DataType data_type, const std::vector<int64_t>& shape);
// Of which rows a call sends, or gets, a whole tensor.
RowsView RowsOf(const TensorView& values);
RowsView RowsOf(TensorBuffer& buffer);
// INVALID_ARGUMENT if reading the elements would leave the caller's memory.
absl::Status CheckElements(const std::string& field, const TensorView& values);

// Makes a call and waits for its answer, which is a `Result`.
template <typename Result, typename Message>
absl::StatusOr<Result> Run(Core& core, const char* path, Message message, Deadline deadline, CallMemory memory = {}) {
  absl::StatusOr<Request> request =
      core.MakeRequest(path, std::make_unique<Message>(std::move(message)), std::move(memory), deadline);
  if (!request.ok()) return request.status();
  HEADWATER_ASSIGN_OR_RETURN(Answer answer, core.Run(*std::move(request)));
  return std::move(static_cast<Result&>(*answer.message));
}

// Starts a call whose result is convert(answer).
template <typename Result, typename Message, typename Convert>
Future<Result> Start(const std::shared_ptr<Core>& core, const char* path, Message message, Deadline deadline, CallMemory memory,
                     Convert convert) {
  auto state = std::make_shared<FutureState<Result>>();
  absl::StatusOr<Request> request =
      core->MakeRequest(path, std::make_unique<Message>(std::move(message)), std::move(memory), deadline);
  if (!request.ok()) {
    state->Set(request.status());
    return Future<Result>(state);
  }
  // `read` may hold the last reference to the core, which must not be dropped on one of its own threads: it goes before the result
  // is there.
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
  const std::shared_ptr<Call> call = core->NewCall(*std::move(request), std::move(finish));
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
