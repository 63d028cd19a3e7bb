#include "client/cpp/src/decision.h"

#include <stop_token>
#include <utility>

#include "client/cpp/src/convert.h"
#include "client/cpp/src/retried_call.h"

namespace headwater::client::internal {
namespace {

// What the two decisions differ in.
struct CommitTraits {
  using Request = v1::CommitMicroBatchRequest;
  using Response = v1::CommitMicroBatchResponse;
  using Result = CommitResult;
  template <typename... Arguments>
  static void Send(v1::LossService::Stub& stub, Arguments&&... arguments) {
    stub.async()->CommitMicroBatch(std::forward<Arguments>(arguments)...);
  }
  static Result ToResult(const Response& response) { return {response.replayed()}; }
  static void Log(ReplayLog& log, LogEntry entry) { log.Add(std::move(entry)); }
};

struct DiscardTraits {
  using Request = v1::DiscardMicroBatchRequest;
  using Response = v1::DiscardMicroBatchResponse;
  using Result = DiscardResult;
  template <typename... Arguments>
  static void Send(v1::LossService::Stub& stub, Arguments&&... arguments) {
    stub.async()->DiscardMicroBatch(std::forward<Arguments>(arguments)...);
  }
  static Result ToResult(const Response& response) { return {response.dropped()}; }
  static void Log(ReplayLog& log, LogEntry entry) { log.AddDiscard(std::move(entry)); }
};

template <typename Traits>
class DecisionCall : public RetriedCall {
 public:
  using Request = typename Traits::Request;
  using Result = typename Traits::Result;

  // `request` has all but heads and session.
  DecisionCall(std::shared_ptr<Connection> connection, HeadUses heads, Request request, Deadline deadline, CallMode call_mode,
               std::shared_ptr<FutureState<Result>> state)
      : RetriedCall(std::move(connection), std::move(heads), /*in_session=*/true, deadline, call_mode),
        request_(std::move(request)),
        state_(std::move(state)) {}

 private:
  void StartAttempt() override {
    request_.clear_heads();
    for (const HeadUse& use : heads()) *request_.add_heads() = use.ToHeadStep();
    request_.set_session_id(session_id());
    Traits::Send(connection().loss(), &context(), &request_, &response_, [this](const grpc::Status& status) {
      absl::Status failure;
      React([&] { failure = connection().FromGrpc(status); }, [&](absl::Status shortage) { failure = std::move(shortage); });
      if (!failure.ok()) return Failed(std::move(failure));
      if (mode() == CallMode::kNormal) Enter([this] { Log(); });
      Succeeded();
      const std::shared_ptr<FutureState<Result>> state = state_;  // once the result is set this object may be gone
      state->Set(Traits::ToResult(response_));
    });
  }

  void SetError(absl::Status status) override {
    const std::shared_ptr<FutureState<Result>> state = state_;
    state->Set(std::move(status));
  }

  void Log() {
    ReplayLog& log = connection().replay_log();
    for (const HeadUse& use : heads()) log.StepIsOpen(use.state, *use.step);
    if (!log.enabled()) return;
    LogEntry entry;
    entry.heads = heads();
    entry.micro_batch = request_.micro_batch();
    entry.attempt = request_.attempt();
    entry.bytes = static_cast<int64_t>(request_.ByteSizeLong());
    entry.repeat = std::make_shared<Repetition>([request = request_](Connection& target, const HeadUses& uses, const Wait& wait) {
      auto state = std::make_shared<FutureState<Result>>();
      // Not kept beyond this call: the connection is the recovery's.
      DecisionCall call(std::shared_ptr<Connection>(std::shared_ptr<Connection>(), &target), uses, request, wait.deadline,
                        CallMode::kReplay, state);
      const std::stop_callback on_cancel(wait.cancel, [&call] { call.Cancel(); });
      call.Start();
      return state->Take().status();
    });
    Traits::Log(log, std::move(entry));
  }

  Request request_;
  typename Traits::Response response_;
  const std::shared_ptr<FutureState<Result>> state_;
};

template <typename Traits>
Future<typename Traits::Result> StartDecision(std::shared_ptr<Connection> connection, MicroBatchKey key,
                                              typename Traits::Request request, const CallOptions& options) {
  request.set_micro_batch(key.micro_batch);
  request.set_attempt(key.attempt);
  const Deadline deadline = connection->DeadlineOf(options);
  auto state = std::make_shared<FutureState<typename Traits::Result>>();
  auto call = std::make_shared<DecisionCall<Traits>>(std::move(connection), std::move(key.heads), std::move(request), deadline,
                                                     CallMode::kNormal, state);
  state->Keep(call, [raw = call.get()] { raw->Cancel(); });
  call->Start();
  return Future<typename Traits::Result>(state);
}

}  // namespace

Future<CommitResult> StartCommit(std::shared_ptr<Connection> connection, MicroBatchKey key, const CommitOptions& commit,
                                 const CallOptions& options) {
  v1::CommitMicroBatchRequest request;
  request.set_factor(commit.factor);
  if (!commit.token_factors.empty()) *request.mutable_token_factors() = ToProto(commit.token_factors);
  return StartDecision<CommitTraits>(std::move(connection), std::move(key), std::move(request), options);
}

Future<DiscardResult> StartDiscard(std::shared_ptr<Connection> connection, MicroBatchKey key, const CallOptions& options) {
  return StartDecision<DiscardTraits>(std::move(connection), std::move(key), v1::DiscardMicroBatchRequest(), options);
}

}  // namespace headwater::client::internal

namespace headwater::client {

Future<CommitResult> Contribution::Commit(const CommitOptions& commit, const CallOptions& options) const {
  return internal::StartCommit(key_->connection, key_->micro_batch, commit, options);
}

Future<DiscardResult> Contribution::Discard(const CallOptions& options) const {
  return internal::StartDiscard(key_->connection, key_->micro_batch, options);
}

}  // namespace headwater::client
