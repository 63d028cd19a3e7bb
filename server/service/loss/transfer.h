// Transfer: how the rows of one micro-batch come in and its gradient goes out, over one stream or several (TransferRows).
// The stream that is free first writes the next rows of the gradient. Rows that have been read are copied once, to where the engine
// reads them, and hashed there; the next message is read only then.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_H_
#define HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/digest.h"
#include "server/service/loss/row_stream.h"
#include "server/service/request/chunk_codec.h"
#include "server/service/server_core.h"
#include "server/transport/pinned_pool.h"
#include "server/transport/row_exchange.h"

namespace headwater::service {

// Thread-safe.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  // A tensor of rows, by the chunks that bring it.
  struct Tensor {
    transport::RowTensor rows;
    int32_t digest_stream = 0;    // 0: hidden states; 1 + term: that term's teacher rows
    std::string why_not;          // why chunks of it are refused, for the message: "because ..."; empty: they are taken
    std::shared_ptr<void> owner;  // of the memory
  };
  struct Options {
    int64_t row_count = 0;
    int64_t term_count = 0;
    int32_t stripe_count = 1;
    bool digest = false;  // hash what comes
  };
  Transfer(ServerCore& core, const Options& options, std::vector<Tensor> tensors);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  transport::RowExchange& exchange() { return exchange_; }
  int32_t stripe_count() const { return options_.stripe_count; }

  // ---- streams
  // Makes `stream` stripe `index`; it carries rows when this returns OK. kInvalidField (`header.stripe_index`) unless it is in
  // [0, stripe_count) and no other stream is that stripe; kTransferNotFound after End().
  absl::Status Join(const std::shared_ptr<RowStream>& stream, int32_t index);
  // Streams that have joined, the primary included.
  int32_t joined() const {
    absl::MutexLock lock(&mutex_);
    return joined_;
  }
  // Takes a chunk that stripe `index` has received.
  absl::Status Take(const ChunkView& chunk, int32_t index);
  // A stream has brought a chunk that Take() refused, or no chunk at all: breaks the transfer, unless all rows are there.
  void OnRefused(const absl::Status& status) {
    // Once every row is there a bad chunk concerns its stream alone: the micro-batch may be committed by now.
    exchange_.BreakIfIncomplete(status);
  }
  void OnHalfClosed();
  // A stripe is gone: kStripeLost for the whole transfer, unless it is over.
  void OnStripeLost();
  // It is over: nothing is taken any more, and the stripes end.
  void End(bool succeeded);

  // The digest's sum over the rows that came. Only when exchange().complete().
  DigestBuilder Digested() const;
  // Counts rows that came otherwise than by chunks into the digest.
  void AddToDigest(size_t tensor, int64_t row_start, int64_t row_count);

  // ---- gradient
  // There is a gradient of `row_count` rows of `row_bytes` bytes at `data`, which `owner` keeps alive. Before the first of its rows
  // is ready.
  void OpenGrad(int64_t row_count, int64_t row_bytes, const uint8_t* data, std::shared_ptr<const void> owner);
  // Rows [0, row_end) of it are final, and leave: with `here`, on this thread, which may wait for a send; otherwise on others.
  void GradReady(int64_t row_end, bool here);
  // The next message to write, which counts as being written until OnWritten(); nullopt if there is none now.
  std::optional<grpc::ByteBuffer> NextGradMessage();
  void OnWritten(bool ok);
  // All of the gradient has been taken by the transport.
  bool grad_sent() const {
    absl::MutexLock lock(&mutex_);
    return writing_ == 0 && exchange_.grad_taken();
  }

 private:
  std::vector<std::shared_ptr<RowStream>> Streams() const;
  absl::StatusOr<size_t> TensorOf(const ChunkView& chunk) const;

  ServerCore& core_;
  const Options options_;
  const std::vector<Tensor> tensors_;
  transport::RowExchange exchange_;
  // One for each stripe, and one for AddToDigest(): each has one writer at a time, and is read when all rows are there.
  std::vector<DigestBuilder> digests_;

  mutable absl::Mutex mutex_;
  std::vector<std::shared_ptr<RowStream>> streams_ ABSL_GUARDED_BY(mutex_);  // by stripe; null: has not come
  int32_t joined_ ABSL_GUARDED_BY(mutex_) = 0;
  int32_t half_closed_ ABSL_GUARDED_BY(mutex_) = 0;
  int32_t writing_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  // Set before the first GradReady().
  const uint8_t* grad_ = nullptr;
  int64_t grad_row_bytes_ = 0;
  std::shared_ptr<const void> grad_owner_;
};

// The handlers of ComputeLoss and TransferRows, whose messages are raw bytes: loss_streams.cc.
RawReactor* StartComputeLoss(ServerCore& core, grpc::CallbackServerContext& context);
RawReactor* StartTransferRows(ServerCore& core, grpc::CallbackServerContext& context);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_H_
