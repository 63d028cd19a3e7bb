// Connection: the channel, its stubs, and what all calls over it share. Thread-safe.
#ifndef HEADWATER_CLIENT_SRC_CONNECTION_H_
#define HEADWATER_CLIENT_SRC_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "client/cpp/src/channel.h"
#include "client/cpp/src/delayed_tasks.h"
#include "client/cpp/src/error.h"
#include "client/cpp/src/head_state.h"
#include "client/cpp/src/recovery.h"
#include "client/cpp/src/replay_log.h"
#include "client/cpp/src/retry.h"
#include "client/cpp/src/session.h"
#include "client/cpp/src/transfer/row_transport.h"
#include "client/cpp/src/wait.h"
#include "headwater/client/client.h"
#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::client::internal {

// Kept by every call and every head; its end waits for its threads, which therefore never hold the last reference.
class Connection {
 public:
  // Waits until the channel is connected.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const std::string& target, const ClientOptions& options);

  const ClientOptions& options() const { return options_; }
  const std::string& target() const { return target_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  v1::LossService::Stub& loss() { return *loss_; }
  v1::HeadService::Stub& heads() { return *heads_; }
  v1::SessionService::Stub& server() { return *server_; }
  Session& session() { return session_; }
  HeadStates& head_states() { return head_states_; }
  ReplayLog& replay_log() { return replay_log_; }
  RowTransport& row_transport() { return row_transport_; }
  // Back-off of asynchronous calls; its tasks are short.
  DelayedTasks& timers() { return timers_; }
  // Recoveries on behalf of asynchronous calls. It has nothing to do while another one has the gate.
  DelayedTasks& recoveries() { return recoveries_; }
  // Asynchronous calls that wait for a recovery's end, until their deadlines. Hurried then; its tasks are short.
  DelayedTasks& waiting() { return waiting_; }

  Deadline DeadlineOf(const CallOptions& call) const;
  // The repetitions of a call. With a replay log a server that is away will be followed when it is back.
  RetryState MakeRetry(Deadline deadline, Repeat repeat) const {
    return RetryState(options_.retry, deadline, repeat, /*awaits_server=*/options_.replay_bytes > 0);
  }

  // Calls attempt(context), which returns an absl::Status, until it succeeds or its failure is final. Blocks.
  // No longer than `wait`.
  template <typename Attempt>
  absl::Status Retry(Repeat repeat, const Wait& wait, Attempt attempt) {
    RetryState retry = MakeRetry(wait.deadline, repeat);
    for (;;) {
      const absl::Status status = RunAttempt(wait, attempt);
      if (status.ok() || wait.cancel.stop_requested()) return status;
      const auto delay = retry.AfterFailure(status);
      if (!delay.has_value()) return status;
      wait.Pause(*delay);
    }
  }

  // Likewise for a call on steps: `heads` get their current epochs before each attempt, and after the server's restart the step is
  // recovered if the replay log allows it. attempt() puts what it did into the log.
  template <typename Attempt>
  absl::Status RetryOnSteps(HeadUses& heads, Deadline deadline, Attempt attempt, Repeat repeat = Repeat::kSafe) {
    RetryState retry = MakeRetry(deadline, repeat);
    for (int recoveries = 0;;) {
      while (!replay_log_.TryEnter(heads)) {
        if (absl::Status late = replay_log_.WaitForRecovery(deadline); !late.ok()) return late;
      }
      for (HeadUse& use : heads) use.epoch = use.state->epoch();
      absl::Status status;
      try {
        status = RunAttempt(deadline, attempt);
      } catch (...) {
        // There is no memory, for the log perhaps: a recovery would repeat the step without what this attempt did.
        replay_log_.BeginAfter(heads);
        replay_log_.Leave(heads);
        throw;
      }
      replay_log_.Leave(heads);
      if (status.ok()) return status;
      if (recoveries < kMaxRecoveries && MayRecover(replay_log_, status)) {
        ++recoveries;
        absl::StatusOr<ReplayLog::Gate> gate = replay_log_.Close(deadline);
        if (!gate.ok()) return gate.status();
        if (absl::Status lost = Recover(*this, *std::move(gate), heads, status, deadline); !lost.ok()) return lost;
        continue;
      }
      const auto delay = retry.AfterFailure(status);
      if (!delay.has_value()) return status;
      std::this_thread::sleep_for(*delay);
    }
  }

  // A blocking unary call: Call(stub, &Stub::Method, request, repeat, options).
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                const Request& request, Repeat repeat, const Wait& wait) {
    Response response;
    const absl::Status status =
        Retry(repeat, wait, [&](grpc::ClientContext& context) { return FromGrpc((stub.*method)(&context, request, &response)); });
    if (!status.ok()) return status;
    return response;
  }
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                const Request& request, Repeat repeat, const CallOptions& call) {
    return Call(stub, method, request, repeat, DeadlineOf(call));
  }

  absl::Status FromGrpc(const grpc::Status& status) const {
    return status.ok() ? absl::OkStatus() : FromGrpcStatus(status, target_);
  }

  // Of the server process that answers now; empty without replay, where nobody needs it.
  absl::StatusOr<std::string> Incarnation(const Wait& wait);

 private:
  Connection(std::string target, const ClientOptions& options, std::shared_ptr<grpc::Channel> channel);

  template <typename Attempt>
  absl::Status RunAttempt(const Wait& wait, Attempt& attempt) {
    WaitingContext context(wait);
    return attempt(*context.get());
  }

  const std::string target_;
  const ClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::LossService::Stub> loss_;
  const std::unique_ptr<v1::HeadService::Stub> heads_;
  const std::unique_ptr<v1::SessionService::Stub> server_;
  Session session_;
  HeadStates head_states_;
  ReplayLog replay_log_;
  RowTransport row_transport_;
  DelayedTasks timers_;
  DelayedTasks recoveries_;
  DelayedTasks waiting_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_CONNECTION_H_
