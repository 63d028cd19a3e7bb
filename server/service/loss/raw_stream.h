// RawStream: one bidirectional call of gRPC's callback API whose messages are raw bytes. The rules of that API live here: nothing
// starts after the end, the end comes once, the object lives until gRPC and others release it.
//
// The client is watched (StreamWatchdog) while it should send a message, or take one. If it does neither for
// ServerOptions::stream_idle_timeout the call is cancelled, and in any case after Limits::max_stream_time in all.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_RAW_STREAM_H_
#define HEADWATER_SERVER_SERVICE_LOSS_RAW_STREAM_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/guard/stream_watchdog.h"
#include "server/service/server_core.h"

namespace headwater::service {

using RawReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// Made by std::make_shared. Its methods may be called from any thread; the reactions come on gRPC's, one read and one write at a
// time, and must not wait.
class RawStream : public RawReactor, public std::enable_shared_from_this<RawStream> {
 public:
  RawStream(ServerCore& core, grpc::CallbackServerContext& context) : core_(core), context_(context) {}
  RawStream(const RawStream&) = delete;
  RawStream& operator=(const RawStream&) = delete;

  // Before all else: gives gRPC its share of the object, which it has until the call is over, and begins to watch the client.
  RawReactor* Own();

  // Begins to read a message; OnMessage() follows. Not before the last one was answered. `watched` bounds the client's time for it.
  // Without effect after Finish().
  void Read(bool watched);
  // Begins to write; OnWritten() follows if this returns true. Not before the last one was answered. False after Finish().
  bool Write(grpc::ByteBuffer message);
  // Ends the call: with a last message, if there is one. Once. Not with a last message while something is being written.
  void Finish(grpc::Status status, std::optional<grpc::ByteBuffer> last_message = std::nullopt);

  // Asks this about once a second: an error ends the call with it. Before Finish().
  void Allow(std::function<absl::Status()> allowed) { watch_->Allow(std::move(allowed)); }
  // Why the watchdog ended the call; OK if it did not. Before Finish().
  absl::Status why_ended() const { return watch_->why(); }

  // The client has cancelled or gone away, or its deadline has passed.
  bool gone() const { return gone_.load(); }

 protected:
  // A message, or (`ok` false) there are no more of them, because the client has half-closed or is gone.
  virtual void OnMessage(bool ok, grpc::ByteBuffer* message) = 0;
  // The transport has taken the message; `ok` false: it never will.
  virtual void OnWritten(bool ok) = 0;
  // gone() has become true. At most once, concurrently with the others.
  virtual void OnGone() = 0;
  // The watchdog ends the call; on its thread, where nothing may wait. True: it has been finished with `why`. False: it is
  // cancelled, at once and whatever is in progress. The client then gets the code and the sentence, but no reason: gRPC sends no
  // details with a call that it cancels.
  virtual bool OnEnded(const absl::Status& why) = 0;

  ServerCore& core() { return core_; }
  grpc::CallbackServerContext& context() { return context_; }

 private:
  // Between these nothing ends the call.
  bool Enter();
  void Leave();
  void FinishNow();
  // Ends the watch of a message. From Finish() on the watch is for the end, and stays.
  void EndWatch() {
    absl::MutexLock lock(&mutex_);
    if (!ending_) watch_->End();
  }

  // An exception ends the process: gRPC would forget it, and the call would never be over.
  void OnReadDone(bool ok) noexcept final;
  void OnWriteDone(bool ok) noexcept final;
  void OnCancel() noexcept final;
  void OnDone() noexcept final;

  ServerCore& core_;
  grpc::CallbackServerContext& context_;  // until OnDone()
  std::shared_ptr<RawStream> self_;       // gRPC's share
  std::optional<guard::StreamWatchdog::Watch> watch_;
  std::atomic<bool> gone_{false};
  bool read_watched_ = false;  // the read in progress
  grpc::ByteBuffer read_message_;
  grpc::ByteBuffer written_message_;

  absl::Mutex mutex_;
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_;                           // set before `ending_`
  std::optional<grpc::ByteBuffer> last_message_;  // set before `ending_`
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_RAW_STREAM_H_
