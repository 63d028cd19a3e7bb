// One micro-batch: its message, its rows, and its result.
#ifndef HEADWATER_CLIENT_SRC_LOSS_CALL_H_
#define HEADWATER_CLIENT_SRC_LOSS_CALL_H_

#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/src/head_handle.h"
#include "headwater/client/future.h"
#include "headwater/client/types.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

// A micro-batch that is ready to be sent.
struct LossInput {
  v1::MicroBatchHeader header;
  RowsView hidden;
  std::vector<RowsView> teacher_hidden;              // one for each term; without memory: the term has no teacher
  std::vector<std::shared_ptr<HeadHandle>> trained;  // the heads whose steps it adds to, once each
  DataType grad_hidden_data_type = DataType::kFloat32;
  bool want_grad_hidden = false;
  absl::Span<unsigned char> grad_hidden;  // empty: the result owns it
  Memory grad_hidden_memory = Memory::kHost;
  void* cuda_stream = nullptr;
};

// Starts the call; the result comes after the last access to the input's rows and to `grad_hidden`. INVALID_ARGUMENT where a view
// would make this side read or write out of bounds; the server checks everything else.
Future<MultiResult> StartMulti(const std::shared_ptr<Core>& core, LossInput input, const CallOptions& options);
Future<LossResult> StartLoss(const std::shared_ptr<Core>& core, LossInput input, const CallOptions& options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_LOSS_CALL_H_
