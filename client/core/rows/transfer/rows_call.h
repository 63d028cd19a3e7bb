// RowsCall: the attempts of a call that carries rows, around their streams.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROWS_CALL_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROWS_CALL_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/call/exchange.h"
#include "client/core/rows/memory/device_memory.h"
#include "client/core/rows/transfer/row_transport.h"
#include "client/core/rows/transfer/transfer_call.h"
#include "headwater/client/tensor.h"

namespace headwater::client::internal {

// Streams for so many bytes each way: more of them for more bytes, `max_stripes` at most. Starting a stream costs about as much as
// sending a few hundred kilobytes.
int StripesFor(int64_t bytes_up, int64_t bytes_down, int max_stripes);

// Members are used by one thread at a time, except for Cancel().
class RowsCall : public Exchange {
 public:
  void Cancel() override;

 protected:
  explicit RowsCall(RowTransport& transport) : transport_(transport) {}

  RowTransport& transport() { return transport_; }
  bool cancelled() const { return cancel_.stop_requested(); }
  // Until the deadline, or Cancel().
  Wait Until() const { return {deadline_, cancel_.get_token()}; }

  // An attempt begins, which ends with `done`.
  void SetAttempt(Deadline deadline, Done done);
  // Runs the attempt's beginning on a thread that may block; at once if the call is cancelled. An error ends the attempt.
  void RunBeginning(std::function<absl::Status()> begin);

  // Gets connections for so many bytes each way. The first is false if it would have to block.
  bool TryConnect(int64_t bytes_up, int64_t bytes_down);
  absl::Status Connect(int64_t bytes_up, int64_t bytes_down);
  // Once connected.
  int stripes() const { return static_cast<int>(leases_.size()); }
  // Sends over these connections; `request.chunk_bytes`, `.target` and `.deadline` are filled in here.
  void Send(TransferRequest request);
  // The transfer has ended. Runs on a thread that may block if EndBlocks(result).
  virtual void Ended(TransferResult result) = 0;
  // Whether the end of the attempt copies rows, waits for copies, or calls the server.
  virtual bool EndBlocks(const TransferResult& result) const = 0;
  // The attempt ends. Waits for copies that still read the caller's memory, of rows that are no longer sent, and keeps successful
  // copies for the next attempt.
  void Deliver(absl::StatusOr<Answer> answer);

  // Rows in host memory, `data` and `arrival` of OutgoingRows: the view itself, or a copy of device memory. The copy is made once
  // for all rows that begin at its address and are no more. Blocks until the copy has begun, or for all of it if there is no
  // page-locked memory.
  absl::Status BringToHost(const RowsView& rows, void* cuda_stream, OutgoingRows* outgoing);
  // Host memory that stands for device memory: staging, or ordinary memory where there is none. RESOURCE_EXHAUSTED.
  absl::StatusOr<RowMemory> Allocate(const void* device_data, int64_t bytes);

 private:
  struct HostCopy {
    const void* device_data;
    int64_t bytes;
    RowMemory memory;
    std::unique_ptr<DeviceRead> arrival{};  // null: the rows are there
  };

  RowTransport& transport_;
  ServerFacts facts_;
  std::vector<ConnectionLease> leases_;
  std::vector<HostCopy> copies_;

  Deadline deadline_;
  Done done_;

  std::stop_source cancel_;

  std::mutex mutex_;
  std::shared_ptr<TransferCall> call_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROWS_CALL_H_
