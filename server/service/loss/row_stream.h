// RowStream: one call of ComputeLoss or TransferRows, as a bidirectional stream of gRPC's callback API whose messages are raw
// bytes. Once it has joined a transfer it reads chunks and writes rows of the gradient. The rules of that API live here: nothing
// starts after the end, the end comes once, the object lives until gRPC and others release it.
//
// The client is watched (StreamWatchdog) while it should send its first message, or take one. If it does neither for
// ServerOptions::stream_idle_timeout the call is cancelled, and in any case after Limits::max_stream_time in all.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_ROW_STREAM_H_
#define HEADWATER_SERVER_SERVICE_LOSS_ROW_STREAM_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/guard/stream_watchdog.h"
#include "server/service/server_core.h"

namespace headwater::service {

class Transfer;

using RawReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// The end of a call, which nothing brings about between Enter() and Leave(). Thread-safe.
class StreamEnd {
 public:
  // False from Begin() on.
  bool Enter();
  // Whether the call is to be finished now.
  bool Leave();
  // Sets the fields below; whether the call is to be finished now. Without effect after the first time.
  bool Begin(grpc::Status end_status, std::optional<grpc::ByteBuffer> message);
  // Runs it unless Begin() was called, which waits for it.
  void UnlessBegun(absl::FunctionRef<void()> run);

  grpc::Status status;
  std::optional<grpc::ByteBuffer> last_message;

 private:
  absl::Mutex mutex_;
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
};

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

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_ROW_STREAM_H_
