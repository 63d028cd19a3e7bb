// TransferCall: one RPC that carries rows up and, for a micro-batch, gradients down, on as many streams as it is given connections.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_TRANSFER_CALL_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_TRANSFER_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/core/link/delayed_tasks.h"
#include "client/core/rows/transfer/connection_pool.h"
#include "client/core/rows/transfer/row_queue.h"

namespace headwater::client::internal {

// The data of one transfer.
struct TransferRequest {
  std::string method;         // "/headwater.v1.LossService/ComputeLoss", ...
  std::string first_message;  // serialized, with the header
  std::string transfer_id;    // names the call to its further streams; not looked at where there is one stream
  std::vector<OutgoingRows> rows;
  int64_t chunk_bytes = 0;               // of a message's rows, at least a row
  bool answer_is_message = false;        // the single response message is the answer; else responses are ComputeLossResponse
  unsigned char* grad_hidden = nullptr;  // where the gradient's rows go; null: none are expected
  int64_t grad_row_count = 0;
  int64_t grad_row_bytes = 0;
  // Called with bytes [first, first + count) of grad_hidden that have arrived; may be empty. Called by gRPC's threads, by several
  // at once, and never after the result. An error fails the call.
  std::function<absl::Status(int64_t first, int64_t count)> on_grad_rows;
  std::string target;  // the server's name in errors
  Deadline deadline;
};

// How it ended.
struct TransferResult {
  absl::Status status;
  std::string answer;     // OK only: the serialized summary (or the response message)
  bool answered = false;  // the server has ended the call itself; otherwise it may still be at work on it
  // A further stream was refused as an unknown method: the server takes one stream only.
  bool no_stripes = false;
};

// One attempt. Stream 0 is the primary one; the others are TransferRows. Rows are sent on any stream that has room. Payload slices
// refer to the caller's memory. Gradients are copied once, from gRPC's memory to their destination, by any stream. Each row comes
// exactly once.
//
// The result comes after the last access to the caller's memory, also where the call is cancelled or cut. All streams have then
// ended, and gRPC refers to none of the slices. If that is not so kReleaseGrace after they were cancelled, or after the deadline,
// the connections are broken.
class TransferCall : public std::enable_shared_from_this<TransferCall> {
 public:
  using Done = std::function<void(TransferResult)>;

  // `connections`: one for each stream, at least one. `timers` and `workers` must live until the call has ended; `done` is called
  // once, by a thread of gRPC or of `workers`.
  TransferCall(TransferRequest request, std::vector<ConnectionLease> connections, DelayedTasks& timers, DelayedTasks& workers,
               Done done);
  ~TransferCall();

  // Once. The call keeps itself until it has ended.
  void Start();
  // Ends the call early; at any time.
  void Cancel();

 private:
  class Stream;

  absl::Status TakeResponse(int stream, const grpc::ByteBuffer& message);
  void StreamEnded(int stream, const grpc::Status& status);
  void Fail(absl::Status status);

  // Outside the lock. It may be called for a stream that has ended or not begun, too.
  void CancelStreams();
  // Runs task(*this) then, unless the call has gone.
  void After(std::chrono::nanoseconds grace, std::function<void(TransferCall& call)> task);
  // Cancels the remaining streams when no gradient's row has come for a while.
  void CutWhenRowsStop();
  // Cancels the remaining streams.
  void Cut();
  // Breaks the connections if the call has not ended by then.
  void BreakAfter(std::chrono::nanoseconds grace);
  TransferResult MakeResult();
  void Finish();
  // A slice of the caller's memory is referred to, or not any more. Each stream counts as one until it has ended.
  void Refer() { ++references_; }
  void Release(bool by_stream);
  static void ReleaseSlice(void* call) { static_cast<TransferCall*>(call)->Release(/*by_stream=*/false); }

  const TransferRequest request_;
  DelayedTasks& timers_;
  DelayedTasks& workers_;
  Done done_;
  RowQueue queue_;
  RowCoverage received_;
  std::vector<std::unique_ptr<Stream>> streams_;  // after Start() under the lock
  std::shared_ptr<TransferCall> self_;            // from Start() to Finish()
  std::atomic<int64_t> references_ = 0;

  std::mutex mutex_;
  bool cancelled_ = false;  // by the caller
  size_t ended_ = 0;
  absl::Status answer_error_;  // the first thing that was wrong with the answer
  std::optional<std::string> answer_;
  std::optional<grpc::Status> primary_;  // once it has ended
  std::optional<grpc::Status> stripe_;   // the first stripe that failed
  bool cut_ = false;                     // this side has ended the streams that were left, because another had ended
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_TRANSFER_CALL_H_
