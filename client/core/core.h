// Core: one connection that speaks messages. It knows no typed API: typed libraries build requests and read answers.
#ifndef HEADWATER_CLIENT_CORE_CORE_H_
#define HEADWATER_CLIENT_CORE_CORE_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/call/call.h"
#include "client/core/call/completion_queue.h"
#include "client/core/call/turns.h"
#include "client/core/link/delayed_tasks.h"
#include "client/core/link/session.h"
#include "client/core/link/wait.h"
#include "client/core/replay/abandoned.h"
#include "client/core/replay/head_state.h"
#include "client/core/replay/replay_log.h"
#include "client/core/rows/transfer/row_transport.h"
#include "headwater/client/options.h"
#include "headwater/v1/head_service.grpc.pb.h"

namespace headwater::client::internal {

// Kept by every call; its end waits for its threads, which therefore never hold the last reference. Thread-safe.
class Core : public std::enable_shared_from_this<Core> {
 public:
  // Waits until the server is reached.
  static absl::StatusOr<std::shared_ptr<Core>> Open(const std::string& target, const ClientOptions& options);
  ~Core();

  const ClientOptions& options() const { return options_; }
  const std::string& target() const { return target_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // ---- calls ----
  // The call of the method whose request `message` is. The fields that the core fills in are ignored.
  Request MakeRequest(std::unique_ptr<google::protobuf::Message> message, CallMemory memory, Deadline deadline);
  // A call, to be started and kept until its end.
  std::shared_ptr<Call> NewCall(Request request, Call::Done done);
  // Makes a call and waits for its end.
  absl::StatusOr<Answer> Run(Request request);
  // Makes a call for a recovery, which ends with `wait`. `message` is sent as it is; no memory.
  absl::StatusOr<Answer> RunInner(const google::protobuf::Message& message, const CallMemory& memory, const Wait& wait);
  template <typename Result>
  absl::StatusOr<Result> Ask(const google::protobuf::Message& message, const Wait& wait) {
    absl::StatusOr<Answer> answer = RunInner(message, {}, wait);
    if (!answer.ok()) return answer.status();
    return std::move(static_cast<Result&>(*answer->message));
  }

  // Shared if the system and the options allow it, which keeps this object; ordinary otherwise. RESOURCE_EXHAUSTED.
  absl::StatusOr<RowMemory> AllocateRows(int64_t bytes);

  // Cancels running calls and, when they have ended, closes the sessions, both at most until `deadline`. Later calls:
  // FAILED_PRECONDITION.
  void Close(Deadline deadline);

  // The epoch that calls which name `epoch` carry now.
  std::string CurrentEpoch(const std::string& head, const std::string& epoch) const;
  // Tags of calls that have ended, where the caller asked for them.
  CompletionQueue& completions() { return completions_; }

  // Takes the oldest notice for people that was not taken yet, if it has at most `most` bytes; empty: there is none.
  std::string TakeNotice(size_t most);
  // The size of that notice; 0 if there is none.
  size_t next_notice_bytes() const { return next_notice_bytes_; }
  // The program is about to end: calls of its background wait for an absent server no more.
  void StopWaiting();
  bool has_stopped_waiting() const { return has_stopped_waiting_; }

  // ---- for calls ----
  absl::Status Enlist(const std::shared_ptr<Call>& call);
  void Discharge(Call* call);
  Turns& turns() { return turns_; }
  void EndTurn(Call* call, bool had_turn);
  // The server does not know it any more.
  void ForgetSession(const std::string& id);

  v1::HeadService::Stub& heads() { return *heads_; }
  Session& session() { return session_; }
  HeadStates& head_states() { return head_states_; }
  ReplayLog& replay_log() { return replay_log_; }
  Abandoned& abandoned() { return abandoned_; }
  RowTransport& row_transport() { return row_transport_; }
  // Back-off of calls; its tasks are short.
  DelayedTasks& timers() { return timers_; }
  // Recoveries on behalf of calls, or without a call. They do nothing while another one has the gate.
  DelayedTasks& recoveries() { return recoveries_; }
  // Calls that wait for an event, until their deadlines. Hurried when it comes; its tasks are short.
  DelayedTasks& waiting() { return waiting_; }

 private:
  Core(std::string target, const ClientOptions& options, std::shared_ptr<grpc::Channel> channel);

  std::shared_ptr<Core> borrowed() { return {std::shared_ptr<void>(), this}; }
  void AddNotice(std::string sentence);
  // The session is gone. If the server restarted, others may wait for this client's submissions.
  void RecoverIdle(Deadline deadline);

  CompletionQueue completions_;
  const std::string target_;
  const ClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::HeadService::Stub> heads_;
  std::stop_source closing_;
  std::atomic<bool> has_stopped_waiting_ = false;
  std::atomic<size_t> next_notice_bytes_ = 0;
  std::mutex mutex_;  // of these four
  std::condition_variable all_ended_;
  std::deque<std::string> notices_;
  bool closed_ = false;
  std::map<Call*, std::weak_ptr<Call>> calls_;
  Turns turns_;
  HeadStates head_states_;
  ReplayLog replay_log_;
  RowTransport row_transport_;
  Abandoned abandoned_;
  Session session_;
  DelayedTasks timers_;
  DelayedTasks recoveries_;
  DelayedTasks waiting_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_CORE_H_
