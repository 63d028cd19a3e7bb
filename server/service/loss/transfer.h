// Transfer: how the rows of one micro-batch come in and its gradient goes out, over one stream or several (TransferRows).
// The stream that is free first writes the next rows of the gradient. Rows that have been read are copied once, to where the engine
// reads them, and hashed there; the next message is read only then.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_H_
#define HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/digest.h"
#include "server/guard/stream_watchdog.h"
#include "server/service/request/chunk_codec.h"
#include "server/service/server_core.h"
#include "server/transport/pinned_pool.h"
#include "server/transport/row_exchange.h"

namespace headwater::service {

class Transfer;

using RawReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// The end of a call, which nothing brings about between Enter() and Leave(). Thread-safe.
class StreamEnd {
 public:
  // False from Begin() on.
  bool Enter() {
    absl::MutexLock lock(&mutex_);
    if (!begun_) ++starting_;
    return !begun_;
  }
  // Whether the call is to be finished now.
  bool Leave() {
    absl::MutexLock lock(&mutex_);
    return --starting_ == 0 && begun_;
  }
  // Sets the fields below; whether the call is to be finished now. Without effect after the first time.
  bool Begin(grpc::Status end_status, std::optional<grpc::ByteBuffer> message) {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(begun_, true)) return false;
    status = std::move(end_status);
    last_message = std::move(message);
    return starting_ == 0;
  }
  // Runs it unless Begin() was called, which waits for it.
  void UnlessBegun(absl::FunctionRef<void()> run) {
    absl::MutexLock lock(&mutex_);
    if (!begun_) run();
  }

  grpc::Status status;
  std::optional<grpc::ByteBuffer> last_message;

 private:
  absl::Mutex mutex_;
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
};

// One call of ComputeLoss or TransferRows, as a bidirectional stream of gRPC's callback API whose messages are raw bytes. Once it
// has joined a transfer it reads chunks and writes rows of the gradient. The rules of that API live here: nothing starts after the
// end, the end comes once, the object lives until gRPC and others release it.
//
// The client is watched (StreamWatchdog) while it should send its first message, or take one. If it does neither for
// ServerOptions::stream_idle_timeout the call is cancelled, and in any case after Limits::max_stream_time in all.
//
// Made by std::make_shared. Its methods may be called from any thread; the reactions come on gRPC's, one read and one write at a
// time, and must not wait.
class RowStream : public RawReactor, public std::enable_shared_from_this<RowStream> {
 public:
  RowStream(ServerCore& core, grpc::CallbackServerContext& context) : core_(core), context_(context) {}

  // Before all else: gives gRPC its share of the object, which it has until the call is over, and begins to watch the client.
  RawReactor* Own();
  // Begins to read the next message. Not before the last one was answered. Without effect after Finish().
  void Read();
  // Carries rows of `transfer` from now on, as its stream `stripe_index`. Once. Begins to read.
  void Carry(std::shared_ptr<Transfer> transfer, int32_t stripe_index);
  // Sends the next rows of the gradient, if there are any and nothing is being sent. Not from within the engine.
  void Pump();
  // Ends the call: with a last message, if there is one. Once. Not with a last message while something is being written.
  void Finish(grpc::Status status, std::optional<grpc::ByteBuffer> last_message = std::nullopt);

  // Asks this about once a second: an error ends the call with it. Before Finish().
  void Allow(std::function<absl::Status()> allowed) { watch_->Allow(std::move(allowed)); }
  // Why the watchdog ended the call; OK if it did not. Before Finish().
  absl::Status why_ended() const { return watch_->why(); }
  // The client has cancelled or gone away, or its deadline has passed.
  bool gone() const { return gone_.load(); }

  // Called by the transfer, once: it is over. The primary stream, which ends it, does nothing.
  virtual void OnTransferEnd(bool /*succeeded*/) {}

 protected:
  // The message before Carry(), or (`ok` false) there is none, because the client has half-closed or is gone.
  virtual void OnFirstMessage(bool ok, grpc::ByteBuffer* message) = 0;
  // gone() has become true. At most once, concurrently with the others. `transfer` is null before Carry().
  virtual void OnStreamGone(Transfer* transfer) = 0;
  // This very stream has broken the transfer by a chunk that was refused; `status` says why. The primary stream's thread sees that.
  virtual void OnRefused(const absl::Status& /*status*/) {}
  // The watchdog ends the call; on its thread, where nothing may wait. True: it has been finished with `why`. False: it is
  // cancelled, at once and whatever is in progress. The client then gets the code and the sentence, but no reason: gRPC sends no
  // details with a call that it cancels.
  virtual bool OnEnded(const absl::Status& why) = 0;

  // The status of a refused chunk, from before the transfer knows of it; OK if there is none.
  absl::Status refusal() {
    absl::MutexLock lock(&transfer_mutex_);
    return refusal_;
  }
  ServerCore& core() { return core_; }
  grpc::CallbackServerContext& context() { return context_; }

 private:
  std::shared_ptr<Transfer> transfer() {
    absl::MutexLock lock(&transfer_mutex_);
    return transfer_;
  }
  // Takes the chunk that was read, and reads the next one.
  void OnChunk(Transfer& transfer);
  // Begins to write. False after Finish().
  bool Write(grpc::ByteBuffer message);
  void FinishNow();
  // Ends the watch of a message. From Finish() on the watch is for the end, and stays.
  void EndWatch() {
    end_.UnlessBegun([this] { watch_->End(); });
  }

  // An exception ends the process: gRPC would forget it, and the call would never be over.
  void OnReadDone(bool ok) noexcept final;
  void OnWriteDone(bool ok) noexcept final;
  void OnCancel() noexcept final;
  void OnDone() noexcept final;

  ServerCore& core_;
  grpc::CallbackServerContext& context_;  // until OnDone()
  std::shared_ptr<RowStream> self_;       // gRPC's share
  std::optional<guard::StreamWatchdog::Watch> watch_;
  std::atomic<bool> gone_{false};
  grpc::ByteBuffer read_message_;
  grpc::ByteBuffer written_message_;

  absl::Mutex transfer_mutex_;
  std::shared_ptr<Transfer> transfer_ ABSL_GUARDED_BY(transfer_mutex_);
  absl::Status refusal_ ABSL_GUARDED_BY(transfer_mutex_);
  int32_t stripe_index_ = 0;
  std::atomic<bool> writing_{false};
  StreamEnd end_;
};

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
