// MicroBatchTransfer: the attempts of one micro-batch, each by the best path there is.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_MICRO_BATCH_TRANSFER_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_MICRO_BATCH_TRANSFER_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/core/rows/memory/memory_paths.h"
#include "client/core/rows/transfer/rows_call.h"
#include "headwater/client/tensor.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

// The caller's side of a micro-batch; checked against overflow (CheckRows). The memory stays the caller's until the attempt that
// uses it has ended.
struct CallTensors {
  RowsView hidden;
  std::vector<RowsView> teacher_hidden;  // one for each term; without memory: the term has no such rows
  void* grad_hidden = nullptr;           // null: not wanted
  int64_t grad_row_bytes = 0;
  Memory grad_memory = Memory::kHost;
  void* cuda_stream = nullptr;  // with tensors in device memory

  // Both ways.
  int64_t bytes_up() const;
  int64_t bytes_down() const { return grad_hidden == nullptr ? 0 : hidden.row_count * grad_row_bytes; }
};

struct MicroBatchAnswer {
  std::string summary;    // serialized MicroBatchSummary
  std::string transport;  // the path that this side chose
};

class MicroBatchTransfer : public RowsCall {
 public:
  using Done = std::function<void(absl::StatusOr<MicroBatchAnswer>)>;

  MicroBatchTransfer(RowTransport& transport, CallTensors tensors) : RowsCall(transport), tensors_(std::move(tensors)) {}

  // Starts an attempt, after the end of the one before. `header` says everything but how its rows travel. `done` is called once,
  // after the last access to the caller's memory, by any thread; not by this one unless a call could not even be begun. What the
  // path itself makes necessary is repeated here: a region that the server has forgotten is registered again, a server that refuses
  // stripes gets one stream.
  void StartAttempt(v1::MicroBatchHeader header, Deadline deadline, Done done);

 private:
  void Begin();
  // The server has forgotten the session or a region of the placement.
  void BeginAgain();
  // Places the rows in shared memory if that is possible and wanted, and waits until then for what that needs. An error ends the
  // attempt, unless the wait was shorter than the attempt's.
  absl::Status Place(Deadline until);
  // What goes over the streams; over shared memory nothing does.
  int64_t stream_bytes_up() const { return placement_.has_value() ? 0 : tensors_.bytes_up(); }
  int64_t stream_bytes_down() const { return placement_.has_value() ? 0 : tensors_.bytes_down(); }
  absl::Status SendAll();
  void SendPlaced();
  absl::Status SendRows();
  void SendRequest(TransferRequest request);
  void Ended(TransferResult result) override;
  void EndedPlaced(TransferResult result);
  void EndedByRows(TransferResult result);
  // The gradient's way from the host to the device ends, for an answer or for nothing.
  absl::Status FinishGradCopy(bool answered);
  void Deliver(absl::StatusOr<MicroBatchAnswer> answer);
  bool on_device() const;
  bool IsSmall() const;

  CallTensors tensors_;
  std::optional<Placement> placement_;
  std::optional<HostCopy> grad_copy_;  // where gradients for device memory arrive

  v1::MicroBatchHeader header_;
  Deadline deadline_;
  Done done_;
  bool session_given_ = false;  // by the caller, who replaces it if it has ended
  bool repeated_ = false;       // this attempt, for the path's sake
  int streams_ = 0;
  TransferResult result_;  // between Ended() and what it runs: a task that carried it would need memory
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_MICRO_BATCH_TRANSFER_H_
