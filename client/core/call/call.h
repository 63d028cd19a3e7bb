// Call: one call with its attempts. The only loop of this client: a blocking caller waits for its end.
#ifndef HEADWATER_CLIENT_CORE_CALL_CALL_H_
#define HEADWATER_CLIENT_CORE_CALL_CALL_H_

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>

#include "client/core/call/exchange.h"
#include "client/core/call/method_table.h"
#include "client/core/call/retry.h"
#include "client/core/link/delayed_tasks.h"
#include "client/core/link/wait.h"
#include "client/core/replay/head_state.h"

namespace headwater::client::internal {

class Core;

// A call to make.
struct Request {
  const Method* method = nullptr;
  std::unique_ptr<google::protobuf::Message> message{};  // of the method's type
  CallMemory memory{};
  Deadline deadline{};
  bool patient = true;         // an absent server is waited for, if options and method say so
  bool is_owned = false;       // StreamTeacher: in the session
  bool is_background = false;  // Core::StopWaiting() reaches it
};

// Whether a call is the caller's, or made for a recovery or for another call. An inner call is not logged, waits neither for
// recoveries nor for its turn, and recovers nothing itself.
enum class CallMode { kNormal, kInner };

// A call: attempt after attempt until one succeeds or fails for good. The starter of a call keeps it until `done` is called. gRPC
// and the timers hold no reference to it, because they must never drop the last reference to a core.
class Call : public std::enable_shared_from_this<Call> {
 public:
  // Called once, by any thread, after the last access to the caller's memory and to the call itself.
  using Done = Exchange::Done;

  Call(std::shared_ptr<Core> core, Request request, CallMode mode, Done done);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Once. Blocks only as long as it takes to send a message.
  void Start();
  // At any time, also before Start() and after the end.
  void Cancel();

  const Exchange& exchange() const { return *exchange_; }
  CallMode mode() const { return mode_; }

 private:
  // ---- before an attempt ----
  // Begins an attempt if everything is ready; otherwise it waits, and then runs again.
  void TryBegin();
  bool AwaitTurn();
  bool AwaitSettlement();
  bool AwaitSession();
  bool AwaitRecovery();
  // Waits before the step is applied again, because other trainers repeat their part at the same time. Returns false if it resumes
  // the call itself.
  bool AwaitSeal();
  void FillIn();
  // TryBegin() again when it is not blocked any more; ends the call if it is too late for that. Returns true.
  bool TryLater(const std::function<bool()>& is_blocked, absl::Status late);
  // Runs go_on() when it is hurried, at the deadline, or when the call is cancelled; at once if is_blocked() is false by now.
  void Await(const std::function<bool()>& is_blocked, std::function<void()> go_on);
  // Runs the task after `delay`, at once if the call is cancelled. Takes place with the lock, so that Cancel() either is seen here
  // or finds the task, which takes the lock first. The call cannot end before the lock is released.
  void RunLocked(DelayedTasks& threads, std::chrono::nanoseconds delay, std::function<void()> task);
  // TryBegin() on the timers' thread, after `delay` or when the call is cancelled.
  void BeginAfter(std::chrono::nanoseconds delay);

  // ---- after it ----
  void Answered(absl::StatusOr<Answer> answer);
  void Failed(absl::Status status);
  // Puts a call that succeeded into the log.
  void Record(const google::protobuf::Message& answer);
  // Applies the answer's news about heads; true: the call continues.
  bool TakeNews(const google::protobuf::Message& answer);
  // Recovers the step that an attempt with `cause` has lost, unless another call has done so or is doing so. In that case it waits
  // for the other recovery, and takes over if that failed.
  void RecoverFrom(const absl::Status& cause);
  void Leave();
  // Calls `done`: the last access to this object.
  void End(absl::StatusOr<Answer> result);

  // Makes a call on behalf of this one; go_on(answer) runs at its end.
  void RunInner(const google::protobuf::Message& message, Done go_on);

  bool is_loss() const { return method_.record == Record::kLoss; }
  std::optional<int64_t> micro_batch() const;
  // This call's own end.
  Wait Until() const {
    Wait wait(retry_.deadline(), cancel_.get_token());
    wait.is_background = is_background_;
    return wait;
  }
  bool cancelled() const { return cancel_.stop_requested(); }
  // Whether others repeat at the same time.
  bool is_repetition() const { return mode_ == CallMode::kInner || recovery_count_ > 0; }

  const std::shared_ptr<Core> core_;
  const Method& method_;
  const std::unique_ptr<google::protobuf::Message> message_;
  const CallMemory memory_;
  const CallMode mode_;
  const bool is_patient_;
  const bool is_owned_;
  const bool is_background_;
  Done done_;
  HeadUses heads_;
  const int64_t named_attempt_;
  // One thread at a time uses these: the attempt's end, then the one that begins the next attempt.
  RetryState retry_;
  std::string session_id_;
  bool has_turn_ = false;
  bool may_block_ = false;  // whether this thread may block
  bool opens_session_ = false;
  bool entered_ = false;
  bool sealed_ = false;
  bool cut_ = false;  // an attempt's answer was
  int64_t settlement_ = -1;
  int64_t attempt_ = 0;
  int attempt_count_ = 0;
  int recovery_count_ = 0;
  int session_loss_count_ = 0;
  Answer answer_;  // while its news are taken

  std::stop_source cancel_;
  std::mutex mutex_;  // against Cancel()
  std::shared_ptr<Call> inner_;
  const std::unique_ptr<Exchange> exchange_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_CALL_CALL_H_
