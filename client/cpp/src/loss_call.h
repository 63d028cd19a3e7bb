// One ComputeLoss stream: rows go up while gradients come down.
#ifndef HEADWATER_CLIENT_SRC_LOSS_CALL_H_
#define HEADWATER_CLIENT_SRC_LOSS_CALL_H_

#include <memory>

#include "absl/types/span.h"
#include "client/cpp/src/connection.h"
#include "headwater/client/future.h"
#include "headwater/client/types.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

// A micro-batch that is ready to be sent.
struct LossInput {
  v1::MicroBatchHeader header;
  RowsView hidden;
  RowsView teacher_hidden;  // no rows: there is no teacher
  DataType grad_hidden_data_type = DataType::kFloat32;
  bool want_grad_hidden = false;
  absl::Span<unsigned char> grad_hidden;  // empty: the result owns it
};

// Starts the call; the future completes after the last access to the input's rows and to `grad_hidden`.
// INVALID_ARGUMENT where a view would make this side read or write out of bounds; the server checks everything else.
Future<LossResult> StartLossCall(std::shared_ptr<Connection> connection, LossInput input, const CallOptions& options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_LOSS_CALL_H_
