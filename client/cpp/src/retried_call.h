// RetriedCall: an asynchronous call with its repetitions.
#ifndef HEADWATER_CLIENT_SRC_RETRIED_CALL_H_
#define HEADWATER_CLIENT_SRC_RETRIED_CALL_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <utility>

#include "client/cpp/src/connection.h"
#include "client/cpp/src/reaction.h"
#include "client/cpp/src/wait.h"

namespace headwater::client::internal {

// Whether a call is the caller's, or repeats one on behalf of a recovery: such a one is not logged, does not wait for the
// recovery's end, and recovers nothing itself.
enum class CallMode { kNormal, kReplay };

// Attempt after attempt until one succeeds or fails for good. The future's state keeps the object until it has the result; the side
// of gRPC and of the timers holds no reference: see FutureState.
class RetriedCall {
 public:
  virtual ~RetriedCall() = default;
  RetriedCall(const RetriedCall&) = delete;
  RetriedCall& operator=(const RetriedCall&) = delete;

  // By the caller, once. Opens the session first if the call needs one.
  void Start() { Begin(); }
  // By the caller's side, while it keeps the call; before Start() too.
  void Cancel();

 protected:
  RetriedCall(std::shared_ptr<Connection> connection, HeadUses heads, bool in_session, Deadline deadline, CallMode mode);

  // Makes the RPC, with heads(), session_id() and context(); its end calls Succeeded() or Failed().
  virtual void StartAttempt() = 0;
  // Ends an attempt that does not use context(), and every later one. By the caller's side.
  virtual void CancelAttempt() {}
  // Sets the result: the last access to this object.
  virtual void SetError(absl::Status status) = 0;

  // Runs log(), which puts the attempt into the log. Where there is no memory for that its result stands, but its steps are lost to
  // a recovery, which would repeat them without it.
  template <typename LogAttempt>
  void Enter(LogAttempt log) {
    React([&] { log(); }, [this](const absl::Status&) { connection_->replay_log().BeginAfter(heads_); });
  }
  // The attempt's result is in the log. The caller sets the call's result next.
  void Succeeded();
  // Tries again, or sets the error.
  void Failed(absl::Status status);

  Connection& connection() { return *connection_; }
  const std::shared_ptr<Connection>& shared_connection() const { return connection_; }
  grpc::ClientContext& context() { return *context_; }
  // At their epochs of this attempt.
  const HeadUses& heads() const { return heads_; }
  const std::string& session_id() const { return session_id_; }
  Deadline deadline() const { return retry_.deadline(); }
  CallMode mode() const { return mode_; }
  // Attempts made so far, this one included.
  int attempt_count() const { return attempt_count_; }

 private:
  // Runs `part`, which may throw as long as the call has neither ended nor goes on elsewhere: that ends it.
  template <typename Part>
  void GoOn(Part part) noexcept {
    React(part, [this](absl::Status shortage) {
      Leave();
      SetError(std::move(shortage));
    });
  }
  // May wait for a session.
  void Begin();
  void TryBegin();
  // On another thread, after `delay` or when the call is cancelled.
  void BeginAfter(std::chrono::nanoseconds delay);
  // Begin() where nothing may block.
  void BeginOnTimer();
  // Begin() on a thread that may block; false if the system gives none. With the lock, as BeginOnTimer().
  bool BeginOnWorker();
  // After a failure; throws as a `part`.
  void GoOnAfter(const absl::Status& status);
  // Recovers the step that a call with `cause` has lost, unless another call has done so, or does: then it waits for that one's
  // end, and takes over if nothing came of it. Throws as a `part`.
  void RecoverFrom(const absl::Status& cause);
  // Runs `go_on`, which must neither block nor throw, at the end of another call's recovery, at this call's deadline, or when it is
  // cancelled. Throws as a `part`.
  void AwaitRecovery(std::function<void()> go_on);
  // This call's own end.
  Wait Until() const { return {retry_.deadline(), cancel_.get_token()}; }
  void Leave();
  bool cancelled() const { return cancel_.stop_requested(); }
  absl::Status CancelledError() const;

  const std::shared_ptr<Connection> connection_;
  HeadUses heads_;
  const bool in_session_;
  const CallMode mode_;
  // These by one thread at a time: the attempt's end, then the timer or the worker that begins the next one.
  RetryState retry_;
  std::string session_id_;
  bool entered_ = false;
  int attempt_count_ = 0;
  int recovery_count_ = 0;
  int session_loss_count_ = 0;

  std::stop_source cancel_;
  std::mutex mutex_;  // against Cancel()
  std::unique_ptr<grpc::ClientContext> context_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_RETRIED_CALL_H_
