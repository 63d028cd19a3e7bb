// One ComputeLoss call: rows go up while gradients come down.
#ifndef HEADWATER_CLIENT_SRC_LOSS_CALL_H_
#define HEADWATER_CLIENT_SRC_LOSS_CALL_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/src/connection.h"
#include "headwater/client/future.h"
#include "headwater/client/types.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

// A micro-batch that is ready to be sent.
struct LossInput {
  v1::MicroBatchHeader header;  // epochs, session and attempt are those of each attempt; its `attempt` is the first one's
  RowsView hidden;
  std::vector<RowsView> teacher_hidden;  // one for each term; without memory: the term has no teacher
  HeadUses heads;                        // all that the header names, once each
  DataType grad_hidden_data_type = DataType::kFloat32;
  bool want_grad_hidden = false;
  absl::Span<unsigned char> grad_hidden;  // empty: the result owns it
  Memory grad_hidden_memory = Memory::kHost;
  void* cuda_stream = nullptr;
};

// Adds a head to the input if it is not there.
void AddHead(LossInput& input, const std::shared_ptr<HeadState>& head, std::optional<int64_t> step);

// Starts the call; `state` gets its result after the last access to the input's rows and to `grad_hidden`.
// INVALID_ARGUMENT where a view would make this side read or write out of bounds; the server checks everything else.
void StartLossCall(std::shared_ptr<Connection> connection, LossInput input, const CallOptions& options,
                   const std::shared_ptr<FutureState<MultiResult>>& state);
void StartLossCall(std::shared_ptr<Connection> connection, LossInput input, const CallOptions& options,
                   const std::shared_ptr<FutureState<LossResult>>& state);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_LOSS_CALL_H_
