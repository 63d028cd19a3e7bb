// What the C++ client repeats, when, under which attempt and in which session; and what it leaves alone. Against a scripted server
// that counts RPCs: gRPC itself must repeat none.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/cpp/src/error.h"
#include "client/cpp/src/retry.h"
#include "client/cpp/src/session.h"
#include "headwater/client/client.h"
#include "headwater/client/error.h"
#include "tests/e2e/cpp/scripted_server.h"
#include "tests/e2e/cpp/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kHiddenSize = 4;
// Late by more than this is a defect, not a busy machine.
constexpr milliseconds kSlack{3000};

ClientOptions Quick(int max_attempts) {
  ClientOptions options;
  options.retry = {.max_attempts = max_attempts, .initial_backoff = milliseconds(2), .max_backoff = milliseconds(4)};
  return options;
}

grpc::Status Unavailable() { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"); }

// Reads everything; the header.
v1::MicroBatchHeader ReadAll(ScriptedServer::LossStream* stream) {
  v1::MicroBatchHeader header;
  v1::ComputeLossRequest request;
  while (stream->Read(&request)) {
    if (request.has_header()) header = request.header();
  }
  return header;
}

// A well-formed answer without gradient rows.
void Answer(ScriptedServer::LossStream* stream, const v1::MicroBatchHeader& header) {
  v1::ComputeLossResponse response;
  for (int i = 0; i < header.terms_size(); ++i) response.mutable_summary()->add_terms();
  response.mutable_summary()->set_state(header.commit_mode() == v1::COMMIT_MODE_EXPLICIT ? v1::CONTRIBUTION_STATE_STAGED
                                                                                         : v1::CONTRIBUTION_STATE_COMMITTED);
  stream->Write(response);
}

class ClientRetry : public testing::Test {
 protected:
  void Connect(const ClientOptions& options) {
    client_.emplace(Value(Client::Connect(server_.target(), options)));
    head_.emplace(Value(client_->OpenHead("h")));
  }

  static MicroBatchOptions Options(int64_t micro_batch, CommitMode commit = CommitMode::kEager) {
    MicroBatchOptions options;
    options.step = 0;
    options.micro_batch = micro_batch;
    options.commit = commit;
    options.return_grad_hidden = false;
    return options;
  }
  Future<LossResult> Submit(const MicroBatchOptions& options, const CallOptions& call = {}) {
    return head_->CrossEntropy(RowsView::Float32(rows_, kHiddenSize), targets_, {}, options, call);
  }

  ScriptedServer server_;
  std::optional<Client> client_;
  std::optional<Head> head_;
  const std::vector<float> rows_ = std::vector<float>(2 * kHiddenSize, 0.5F);
  const std::vector<int32_t> targets_ = {1, 2};
};

TEST_F(ClientRetry, TheLongestTimeoutsAreNotThePast) {
  std::promise<void> answer;
  server_.compute_loss = [&answer](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    const v1::MicroBatchHeader header = ReadAll(stream);
    answer.get_future().wait();
    Answer(stream, header);
    return grpc::Status::OK;
  };
  ClientOptions options = Quick(1);
  options.timeout = options.connect_timeout = milliseconds::max();
  Connect(options);
  Future<LossResult> future = Submit(Options(0), {.timeout = milliseconds::max()});
  std::thread answering([&answer] {
    std::this_thread::sleep_for(milliseconds(50));
    answer.set_value();
  });
  EXPECT_TRUE(future.WaitFor(std::chrono::nanoseconds::max()));
  answering.join();
  EXPECT_TRUE(future.Get().ok());
}

TEST_F(ClientRetry, EveryAttemptIsOneRpc) {
  server_.compute_loss = [](grpc::ServerContext*, ScriptedServer::LossStream*) { return Unavailable(); };
  server_.upload_weights = [](ScriptedServer::UploadStream*) { return Unavailable(); };
  server_.list_heads = [](const v1::ListHeadsRequest&, v1::ListHeadsResponse*) { return Unavailable(); };
  server_.unary_status = Unavailable();
  const std::vector<float> weight(8 * kHiddenSize);
  for (const int attempts : {1, 3}) {
    Connect(Quick(attempts));
    const auto expect = [&](const absl::Status& status, const char* what) {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << what << ": " << status;
      EXPECT_EQ(server_.calls.exchange(0), attempts) << what;
    };
    expect(Submit(Options(0)).Get().status(), "CrossEntropy");
    expect(Submit(Options(1, CommitMode::kExplicit)).Get().status(), "explicit CrossEntropy");
    expect(head_->Commit(0, 0).Get().status(), "Commit");
    expect(head_->Discard(0, 0).Get().status(), "Discard");
    expect(head_->Seal(0, 1).status(), "Seal");
    expect(head_->Apply(0, {.learning_rate = 0.1}).status(), "Apply");
    expect(head_->AddGradient(0, 1, RowsView::Float32(rows_, kHiddenSize)).status(), "AddGradient");
    expect(head_->UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)).status(), "UploadWeights");
    expect(head_->ReplaceWeights(0, TensorView::Float32(weight)).status(), "ReplaceWeights");
    expect(client_->ListHeads().status(), "ListHeads");
    expect(client_->AttachHead("h", head_->spec()).status(), "AttachHead");
  }
}

// gRPC tells so of calls that reach a server which shuts down: nobody on this side has cancelled them.
TEST_F(ClientRetry, ACallThatTheServerCutsOffIsRepeatedAsOneWhoseConnectionBroke) {
  const grpc::Status cut_off(grpc::StatusCode::CANCELLED, "CANCELLED");
  server_.compute_loss = [&](grpc::ServerContext*, ScriptedServer::LossStream*) { return cut_off; };
  server_.unary_status = cut_off;
  Connect(Quick(3));
  const auto expect = [&](const absl::Status& status, int attempts, const char* what) {
    EXPECT_FALSE(status.ok()) << what;
    EXPECT_EQ(server_.calls.exchange(0), attempts) << what << ": " << status;
  };
  expect(Submit(Options(0)).Get().status(), 3, "CrossEntropy");
  expect(head_->Commit(0, 0).Get().status(), 3, "Commit");
  expect(head_->Seal(0, 1).status(), 3, "Seal");
  expect(client_->CreateHead("h", head_->spec()).status(), 1, "CreateHead");
}

TEST_F(ClientRetry, WhatIsNotTheSameTwiceIsRepeatedOnlyIfNothingWasDone) {
  Connect(Quick(3));
  server_.unary_status = Unavailable();
  EXPECT_FALSE(client_->CreateHead("h", head_->spec()).ok());
  EXPECT_EQ(server_.calls.exchange(0), 1);
  server_.unary_status = ErrorWithReason(grpc::StatusCode::UNAVAILABLE, "DRAINING");
  EXPECT_FALSE(client_->CreateHead("h", head_->spec()).ok());
  EXPECT_EQ(server_.calls.exchange(0), 3);
}

TEST_F(ClientRetry, LossIsSentAgainUnderTheNextAttemptAndCommittedUnderTheLast) {
  Connect(Quick(5));
  std::vector<int64_t> attempts;
  server_.compute_loss = [&attempts](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    const v1::MicroBatchHeader header = ReadAll(stream);
    attempts.push_back(header.attempt());
    if (attempts.size() == 1) return Unavailable();
    if (attempts.size() == 2) return ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "STAGING_FULL", 1);
    Answer(stream, header);
    return grpc::Status::OK;
  };
  std::vector<v1::CommitMicroBatchRequest> commits;
  server_.commit = [&commits](const v1::CommitMicroBatchRequest& request) {
    commits.push_back(request);
    return commits.size() == 1 ? Unavailable() : grpc::Status::OK;
  };
  const LossResult result = Value(Submit(Options(7, CommitMode::kExplicit)).Get());
  EXPECT_EQ(attempts, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(result.attempt, 2);
  ASSERT_TRUE(result.contribution.has_value());
  Value(result.contribution->Commit({.factor = 0.5}).Get());
  Value(head_->Commit(0, 7, 0.5).Get());
  ASSERT_EQ(commits.size(), 3u);
  for (const v1::CommitMicroBatchRequest& request : commits) {
    EXPECT_EQ(request.attempt(), 2);
    EXPECT_EQ(request.micro_batch(), 7);
    EXPECT_EQ(request.factor(), 0.5);
    EXPECT_EQ(request.session_id(), commits[0].session_id());
    EXPECT_EQ(request.session_id().size(), 32u);
    ASSERT_EQ(request.heads_size(), 1);
    EXPECT_EQ(request.heads(0).head(), "tenants/default/heads/h");
  }
  // Without an id there is nothing that an attempt could be of.
  attempts.assign(2, 0);
  MicroBatchOptions forward;
  forward.forward_only = true;
  Value(Submit(forward).Get());
  EXPECT_EQ(attempts.back(), 0);
}

// The server knows the newest attempt that reached it: whoever goes on after a failure must not fall back behind it.
TEST_F(ClientRetry, WhatFollowsAFailedLossNamesNoEarlierAttempt) {
  Connect(Quick(3));
  std::vector<int64_t> attempts;
  grpc::Status answer = ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "STAGING_FULL", 1);
  server_.compute_loss = [&](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    const v1::MicroBatchHeader header = ReadAll(stream);
    attempts.push_back(header.attempt());
    if (answer.ok()) Answer(stream, header);
    return answer;
  };
  std::vector<int64_t> decided;
  server_.commit = [&decided](const v1::CommitMicroBatchRequest& request) {
    decided.push_back(request.attempt());
    return grpc::Status::OK;
  };
  server_.discard = [&decided](const v1::DiscardMicroBatchRequest& request) {
    decided.push_back(request.attempt());
    return grpc::Status::OK;
  };
  // Nothing was taken: the last attempt may be made again.
  EXPECT_FALSE(Submit(Options(7, CommitMode::kExplicit)).Get().ok());
  EXPECT_EQ(attempts, (std::vector<int64_t>{0, 1, 2}));
  // The last one may have been: it is superseded.
  answer = Unavailable();
  EXPECT_FALSE(Submit(Options(7, CommitMode::kExplicit)).Get().ok());
  EXPECT_EQ(attempts, (std::vector<int64_t>{0, 1, 2, 2, 3, 4}));
  Value(head_->Discard(0, 7).Get());
  EXPECT_EQ(decided, (std::vector<int64_t>{5}));
  answer = grpc::Status::OK;
  EXPECT_EQ(Value(Submit(Options(7, CommitMode::kExplicit)).Get()).attempt, 5);
  // The caller's own count stands if it is further on.
  MicroBatchOptions later = Options(7, CommitMode::kExplicit);
  later.attempt = 9;
  EXPECT_EQ(Value(Submit(later).Get()).attempt, 9);
  Value(head_->Commit(0, 7).Get());
  EXPECT_EQ(decided, (std::vector<int64_t>{5, 9}));
  // Another micro-batch begins at the beginning, and a call that was never sent has had no attempt.
  EXPECT_EQ(Value(Submit(Options(8)).Get()).attempt, 0);
}

TEST_F(ClientRetry, ConflictsAndWrongCallsAreFinal) {
  Connect(Quick(5));
  for (const auto& [code, reason] :
       std::vector<std::pair<grpc::StatusCode, std::string>>{{grpc::StatusCode::INVALID_ARGUMENT, "INVALID_FIELD"},
                                                             {grpc::StatusCode::FAILED_PRECONDITION, "STEP_MISMATCH"},
                                                             {grpc::StatusCode::FAILED_PRECONDITION, "STEP_SEALED"},
                                                             {grpc::StatusCode::ABORTED, "MICRO_BATCH_CONFLICT"},
                                                             {grpc::StatusCode::ABORTED, "MICRO_BATCH_DISCARDED"},
                                                             {grpc::StatusCode::ABORTED, "MICRO_BATCH_IN_PROGRESS"},
                                                             {grpc::StatusCode::ABORTED, "ATTEMPT_SUPERSEDED"},
                                                             {grpc::StatusCode::ABORTED, "EPOCH_FENCED"},
                                                             {grpc::StatusCode::ABORTED, "STEP_LOST"},
                                                             {grpc::StatusCode::ABORTED, "STEP_CONFLICT"},
                                                             {grpc::StatusCode::RESOURCE_EXHAUSTED, "MEMORY_BUDGET_EXCEEDED"},
                                                             {grpc::StatusCode::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"},
                                                             {grpc::StatusCode::INTERNAL, "ENGINE_FAILED"},
                                                             {grpc::StatusCode::PERMISSION_DENIED, "NOT_SESSION_OWNER"}}) {
    server_.unary_status = ErrorWithReason(code, reason);
    server_.compute_loss = [this](grpc::ServerContext*, ScriptedServer::LossStream*) { return server_.unary_status; };
    EXPECT_EQ(ErrorReason(Submit(Options(0)).Get().status()), reason);
    EXPECT_EQ(server_.calls.exchange(0), 1) << reason;
    EXPECT_EQ(ErrorReason(head_->Commit(0, 0).Get().status()), reason);
    EXPECT_EQ(server_.calls.exchange(0), 1) << reason;
    EXPECT_EQ(ErrorReason(head_->Seal(0, 1).status()), reason);
    EXPECT_EQ(server_.calls.exchange(0), 1) << reason;
  }
}

TEST_F(ClientRetry, BackOffDoublesToItsBoundWithJitter) {
  ClientOptions options;
  options.retry = {.max_attempts = 5, .initial_backoff = milliseconds(40), .max_backoff = milliseconds(100)};
  Connect(options);
  server_.unary_status = Unavailable();
  EXPECT_FALSE(head_->Commit(0, 0).Get().ok());
  const std::vector<ScriptedServer::Call> calls = server_.CallsOf("CommitMicroBatch");
  ASSERT_EQ(calls.size(), 5u);
  const milliseconds backoffs[] = {milliseconds(40), milliseconds(80), milliseconds(100), milliseconds(100)};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_GE(calls[i + 1].time - calls[i].time, backoffs[i] / 2);
    EXPECT_LE(calls[i + 1].time - calls[i].time, backoffs[i] + kSlack);
  }
}

// Whatever the policy says, and without using up what it allows for the server's refusals.
TEST_F(ClientRetry, WithAReplayLogAServerThatIsAwayIsWaitedFor) {
  using client::internal::FromGrpcStatus;
  using client::internal::RetryState;
  const absl::Status away = absl::UnavailableError("gone");
  const absl::Status full = FromGrpcStatus(ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL"), "it");
  const auto later = std::chrono::system_clock::now() + std::chrono::hours(1);
  RetryState waits({.max_attempts = 3, .initial_backoff = milliseconds(1), .max_backoff = std::chrono::minutes(5)}, later,
                   client::internal::Repeat::kSafe, /*awaits_server=*/true);
  for (int i = 0; i < 100; ++i) {
    const auto delay = waits.AfterFailure(away);
    ASSERT_TRUE(delay.has_value()) << i;
    EXPECT_LE(*delay, seconds(1));
  }
  // By the policy's own waits, which have not grown meanwhile.
  for (const milliseconds longest : {milliseconds(1), milliseconds(2)}) {
    const auto delay = waits.AfterFailure(full);
    ASSERT_TRUE(delay.has_value());
    EXPECT_LE(*delay, longest);
  }
  EXPECT_FALSE(waits.AfterFailure(full).has_value());
  RetryState answered({.max_attempts = 1}, later, client::internal::Repeat::kSafe, /*awaits_server=*/true);
  EXPECT_TRUE(answered.AfterFailure(absl::CancelledError("cut off")).has_value());
  for (const char* const reason : {"DRAINING", "STARTING"}) {
    EXPECT_TRUE(answered.AfterFailure(FromGrpcStatus(ErrorWithReason(grpc::StatusCode::UNAVAILABLE, reason), "it")).has_value());
  }
  EXPECT_FALSE(
      answered.AfterFailure(FromGrpcStatus(ErrorWithReason(grpc::StatusCode::UNAVAILABLE, "SHARD_NOT_READY"), "it")).has_value());
  RetryState other_each_time({.max_attempts = 3}, later, client::internal::Repeat::kIfNothingWasDone, /*awaits_server=*/true);
  EXPECT_FALSE(other_each_time.AfterFailure(away).has_value());

  ClientOptions options;
  options.replay_bytes = 1 << 20;
  options.retry = {.max_attempts = 1, .initial_backoff = milliseconds(20), .max_backoff = milliseconds(50)};
  Connect(options);
  server_.unary_status = Unavailable();
  for (const bool future : {false, true}) {
    const auto start = steady_clock::now();
    const absl::Status status = future ? head_->Commit(0, 0, 1.0, {.timeout = milliseconds(600)}).Get().status()
                                       : head_->Seal(0, 1, {}, {.timeout = milliseconds(600)}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_GE(steady_clock::now() - start, milliseconds(400));
    EXPECT_GT(server_.calls.exchange(0), 5);
  }
}

TEST_F(ClientRetry, TheLongestBackOffsAreNotThePast) {
  const absl::Status gone = absl::UnavailableError("gone");
  // No test waits for them: this is what a call would wait for.
  const auto never = std::chrono::system_clock::now() + 3 * client::internal::kLongestTimeout;
  for (const milliseconds longest :
       {milliseconds::max(), milliseconds::max() / 2, milliseconds(client::internal::kLongestTimeout)}) {
    SCOPED_TRACE(longest.count());
    client::internal::RetryState both({.max_attempts = 9, .initial_backoff = longest, .max_backoff = longest}, never,
                                      client::internal::Repeat::kSafe);
    for (int i = 0; i < 4; ++i) {
      const auto delay = both.AfterFailure(gone);
      ASSERT_TRUE(delay.has_value());
      EXPECT_GE(*delay, client::internal::kLongestTimeout / 2);
      EXPECT_LE(*delay, client::internal::kLongestTimeout);
    }
    client::internal::RetryState growing({.max_attempts = 99, .initial_backoff = milliseconds(1), .max_backoff = longest}, never,
                                         client::internal::Repeat::kSafe);
    std::chrono::nanoseconds least = milliseconds(1);
    for (int i = 0; i < 80; ++i) {
      const auto delay = growing.AfterFailure(gone);
      ASSERT_TRUE(delay.has_value());
      EXPECT_GE(*delay, least / 2);
      EXPECT_LE(*delay, client::internal::kLongestTimeout);
      least = std::min<std::chrono::nanoseconds>(2 * least, client::internal::kLongestTimeout);
    }
  }

  // Beyond the deadline there is no second attempt, instead of all of them at once.
  ClientOptions options;
  options.retry = {.max_attempts = 5, .initial_backoff = milliseconds::max(), .max_backoff = milliseconds::max()};
  Connect(options);
  server_.unary_status = Unavailable();
  EXPECT_FALSE(head_->Commit(0, 0).Get().ok());
  EXPECT_EQ(server_.calls.exchange(0), 1);
  EXPECT_FALSE(head_->Seal(0, 1).ok());
  EXPECT_EQ(server_.calls.exchange(0), 1);
  Connect(Quick(5));
  server_.unary_status = ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", std::numeric_limits<int64_t>::max());
  EXPECT_FALSE(head_->Seal(0, 1).ok());
  EXPECT_EQ(server_.calls.exchange(0), 1);
}

TEST_F(ClientRetry, DelayThatTheServerAsksForIsRespectedWithinTheDeadline) {
  Connect(Quick(3));
  server_.unary_status = ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 150);
  EXPECT_EQ(ErrorReason(head_->Seal(0, 1).status()), "QUEUE_FULL");
  const std::vector<ScriptedServer::Call> calls = server_.CallsOf("SealStep");
  ASSERT_EQ(calls.size(), 3u);
  EXPECT_GE(calls[1].time - calls[0].time, milliseconds(150));
  EXPECT_GE(calls[2].time - calls[1].time, milliseconds(150));

  server_.unary_status = ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 60000);
  server_.calls = 0;
  const auto start = steady_clock::now();
  EXPECT_EQ(ErrorReason(head_->Commit(0, 0, 1.0, {.timeout = seconds(2)}).Get().status()), "QUEUE_FULL");
  EXPECT_EQ(server_.calls, 1);
  EXPECT_LE(steady_clock::now() - start, seconds(2));
}

TEST_F(ClientRetry, CancelEndsTheWaitForTheNextAttempt) {
  ClientOptions options;
  options.retry = {.max_attempts = 5, .initial_backoff = seconds(60), .max_backoff = seconds(60)};
  Connect(options);
  server_.unary_status = Unavailable();
  server_.compute_loss = [](grpc::ServerContext*, ScriptedServer::LossStream*) { return Unavailable(); };
  const auto start = steady_clock::now();
  Future<CommitResult> commit = head_->Commit(0, 0);
  while (server_.calls < 1) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_FALSE(commit.WaitFor(milliseconds(50)));
  commit.Cancel();
  EXPECT_EQ(ErrorReason(commit.Get().status()), "CANCELLED");
  {
    const Future<LossResult> dropped = Submit(Options(0));
    while (server_.calls < 2) std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_LE(steady_clock::now() - start, seconds(20));
}

TEST_F(ClientRetry, SessionIsOpenedOnceKeptAliveApartAndClosed) {
  server_.WithState([](ScriptedServer::State& state) { state.lease = milliseconds(150); });
  std::vector<std::string> sessions;
  server_.compute_loss = [&sessions](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    const v1::MicroBatchHeader header = ReadAll(stream);
    sessions.push_back(header.session_id());
    Answer(stream, header);
    return grpc::Status::OK;
  };
  Connect(Quick(3));
  Value(Submit(Options(0)).Get());
  EXPECT_TRUE(server_.CallsOf("OpenSession").empty());  // nobody needs one yet
  Value(Submit(Options(1, CommitMode::kExplicit)).Get());
  Value(Submit(Options(2, CommitMode::kExplicit)).Get());
  ASSERT_EQ(sessions.size(), 3u);
  EXPECT_EQ(sessions[0], "");
  EXPECT_EQ(sessions[1].size(), 32u);
  EXPECT_EQ(sessions[2], sessions[1]);
  EXPECT_EQ(server_.CallsOf("OpenSession").size(), 1u);

  const auto deadline = steady_clock::now() + seconds(20);
  while (server_.CallsOf("KeepAlive").size() < 3 && steady_clock::now() < deadline) std::this_thread::sleep_for(milliseconds(5));
  const std::vector<ScriptedServer::Call> renewals = server_.CallsOf("KeepAlive");
  ASSERT_GE(renewals.size(), 3u);
  EXPECT_GE(renewals[1].time - renewals[0].time, milliseconds(40));  // a third of the lease
  EXPECT_NE(renewals[0].peer, server_.CallsOf("ComputeLoss")[0].peer);

  // The server forgets it: the next call that needs one opens another, and is made again.
  server_.WithState([](ScriptedServer::State& state) { state.sessions.clear(); });
  server_.compute_loss = [&](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    const v1::MicroBatchHeader header = ReadAll(stream);
    if (header.session_id() == sessions[1]) return ErrorWithReason(grpc::StatusCode::NOT_FOUND, "SESSION_NOT_FOUND");
    sessions.push_back(header.session_id());
    Answer(stream, header);
    return grpc::Status::OK;
  };
  Value(Submit(Options(3, CommitMode::kExplicit)).Get());
  EXPECT_EQ(server_.CallsOf("OpenSession").size(), 2u);
  EXPECT_NE(sessions.back(), sessions[1]);
  EXPECT_EQ(server_.WithState([](ScriptedServer::State& state) { return state.sessions.size(); }), 1u);

  head_.reset();
  client_.reset();
  EXPECT_EQ(server_.CallsOf("CloseSession").size(), 1u);
  EXPECT_TRUE(server_.WithState([](ScriptedServer::State& state) { return state.sessions.empty(); }));
}

TEST_F(ClientRetry, ASessionForEverIsNotRenewedAllTheTime) {
  server_.WithState([](ScriptedServer::State& state) { state.lease = milliseconds::max(); });
  server_.compute_loss = [](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    Answer(stream, ReadAll(stream));
    return grpc::Status::OK;
  };
  Connect(Quick(3));
  Value(Submit(Options(0, CommitMode::kExplicit)).Get());
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_TRUE(server_.CallsOf("KeepAlive").empty());
}

TEST_F(ClientRetry, WaitingForASessionHoldsUpNoOtherCallsRepetition) {
  std::promise<void> opens;
  const std::shared_future<void> opened = opens.get_future().share();
  std::atomic<bool> forgets = false;
  std::atomic<bool> refuses = true;
  server_.compute_loss = [&](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    const v1::MicroBatchHeader header = ReadAll(stream);
    const bool is_explicit = header.commit_mode() == v1::COMMIT_MODE_EXPLICIT;
    if (is_explicit && forgets.exchange(false)) return ErrorWithReason(grpc::StatusCode::NOT_FOUND, "SESSION_NOT_FOUND");
    if (!is_explicit && refuses.exchange(false)) return Unavailable();
    Answer(stream, header);
    return grpc::Status::OK;
  };
  Connect(Quick(3));
  Value(Submit(Options(0, CommitMode::kExplicit)).Get());
  forgets = true;
  server_.open_session = [opened] { opened.wait(); };
  Future<LossResult> cancelled = Submit(Options(1, CommitMode::kExplicit));
  while (server_.CallsOf("OpenSession").size() < 2) std::this_thread::sleep_for(milliseconds(1));
  Future<LossResult> other = Submit(Options(2));
  // It ends at once, or with the deadline of the one that waits.
  EXPECT_TRUE(other.WaitFor(seconds(60)));
  cancelled.Cancel();
  EXPECT_EQ(ErrorReason(cancelled.Get().status()), "CANCELLED");
  Value(other.Get());
  EXPECT_FALSE(refuses);
  opens.set_value();
  Value(Submit(Options(3, CommitMode::kExplicit)).Get());
  EXPECT_EQ(server_.CallsOf("OpenSession").size(), 2u);
}

// gRPC forgets what is thrown on its threads: who waits for the session, and the end of the connection, would wait for ever.
TEST_F(ClientRetry, ASessionThatNoThreadKeepsAliveIsAnErrorAndOpenedAnew) {
  bool short_of_memory = true;
  client::internal::Session session(server_.target(), Quick(1), [&](std::function<void()> loop) {
    if (short_of_memory) throw std::bad_alloc();
    return std::thread(std::move(loop));
  });
  const auto began = steady_clock::now();
  const absl::Status status = session.Id(std::chrono::system_clock::now() + seconds(30)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "MEMORY_BUDGET_EXCEEDED");
  EXPECT_LT(steady_clock::now() - began, kSlack);
  short_of_memory = false;
  EXPECT_FALSE(Value(session.Id(std::chrono::system_clock::now() + seconds(30))).empty());
  EXPECT_EQ(server_.CallsOf("OpenSession").size(), 2u);
}

TEST_F(ClientRetry, WithoutALeaseThereIsNoSession) {
  std::vector<std::string> sessions;
  server_.commit = [&sessions](const v1::CommitMicroBatchRequest& request) {
    sessions.push_back(request.session_id());
    return grpc::Status::OK;
  };
  ClientOptions options = Quick(1);
  options.session_lease = milliseconds(0);
  Connect(options);
  Value(head_->Commit(0, 0).Get());
  EXPECT_EQ(sessions, std::vector<std::string>{""});
  EXPECT_TRUE(server_.CallsOf("OpenSession").empty());
}

TEST_F(ClientRetry, SeveralTermsUploadTheRowsOnce) {
  Connect(Quick(1));
  Head other = Value(client_->OpenHead("other"));
  Head teacher = Value(client_->OpenHead("teacher"));
  v1::MicroBatchHeader header;
  int64_t hidden_bytes = 0;
  int64_t teacher_bytes = 0;
  server_.compute_loss = [&](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    v1::ComputeLossRequest request;
    while (stream->Read(&request)) {
      if (request.has_header()) header = request.header();
      const bool is_hidden = request.chunk().role() == v1::CHUNK_ROLE_HIDDEN;
      (is_hidden ? hidden_bytes : teacher_bytes) += static_cast<int64_t>(request.chunk().data().size());
      if (request.chunk().role() == v1::CHUNK_ROLE_TEACHER_HIDDEN) {
        EXPECT_EQ(request.chunk().term_index(), 1);
      }
    }
    Answer(stream, header);
    return grpc::Status::OK;
  };
  v1::CommitMicroBatchRequest commit;
  server_.commit = [&commit](const v1::CommitMicroBatchRequest& request) {
    commit = request;
    return grpc::Status::OK;
  };
  const std::vector<float> teacher_rows(kHiddenSize, 1.0F);
  std::vector<LossTerm> terms(3);
  terms[0].targets = targets_;
  terms[1].loss = JsdOptions{.beta = 0.25};
  terms[1].head = other;
  terms[1].step = 3;
  terms[1].row_start = 1;
  terms[1].row_count = 1;
  terms[1].teacher = teacher;
  terms[1].teacher_hidden = RowsView::Float32(teacher_rows, kHiddenSize);
  terms[2].targets = targets_;
  terms[2].loss_scale = 0.5;
  MicroBatchOptions options = Options(4, CommitMode::kExplicit);
  options.late_token_factors = true;
  options.allow_held = true;
  const MultiResult result = Value(head_->Multi(RowsView::Float32(rows_, kHiddenSize), terms, options).Get());
  EXPECT_EQ(result.terms.size(), 3u);
  EXPECT_EQ(hidden_bytes, static_cast<int64_t>(rows_.size() * sizeof(float)));
  EXPECT_EQ(teacher_bytes, static_cast<int64_t>(teacher_rows.size() * sizeof(float)));
  EXPECT_TRUE(header.late_token_factors());
  EXPECT_TRUE(header.allow_held());
  ASSERT_EQ(header.terms_size(), 3);
  EXPECT_EQ(header.terms(0).head().step(), 0);
  EXPECT_EQ(header.terms(1).head().head(), "tenants/default/heads/other");
  EXPECT_EQ(header.terms(1).head().step(), 3);
  EXPECT_EQ(header.terms(1).row_start(), 1);
  EXPECT_EQ(header.terms(1).row_count(), 1);
  EXPECT_EQ(header.terms(1).teacher_hidden().head(), "tenants/default/heads/teacher");
  EXPECT_EQ(header.terms(1).teacher_hidden().head_epoch(), teacher.epoch());
  EXPECT_EQ(header.terms(2).loss_scale(), 0.5);

  ASSERT_TRUE(result.contribution.has_value());
  const std::vector<float> factors = {2.0F, -1.0F};
  Value(result.contribution->Commit({.factor = 3.0, .token_factors = factors}).Get());
  ASSERT_EQ(commit.heads_size(), 2);  // once each, without the teacher
  EXPECT_EQ(commit.heads(0).head(), "tenants/default/heads/h");
  EXPECT_EQ(commit.heads(1).head(), "tenants/default/heads/other");
  EXPECT_EQ(commit.heads(1).step(), 3);
  EXPECT_EQ(commit.token_factors().data(), std::string(reinterpret_cast<const char*>(factors.data()), 8));

  Client stranger = Value(Client::Connect(server_.target(), Quick(1)));
  terms[1].head = Value(stranger.OpenHead("other"));
  EXPECT_EQ(ErrorReason(head_->Multi(RowsView::Float32(rows_, kHiddenSize), terms, options).Get().status()), "INVALID_COMBINATION");
}

TEST_F(ClientRetry, WrongPoliciesAreRefused) {
  for (const RetryPolicy& policy : {RetryPolicy{.max_attempts = 0}, RetryPolicy{.initial_backoff = milliseconds(0)},
                                    RetryPolicy{.initial_backoff = seconds(2), .max_backoff = seconds(1)}}) {
    ClientOptions options;
    options.retry = policy;
    EXPECT_EQ(ErrorReason(Client::Connect(server_.target(), options).status()), "INVALID_FIELD");
  }
  ClientOptions options;
  options.replay_bytes = -1;
  EXPECT_EQ(ErrorReason(Client::Connect(server_.target(), options).status()), "INVALID_FIELD");
  options.replay_bytes = 0;
  for (const milliseconds lease : {milliseconds(-1), milliseconds::max()}) {
    options.session_lease = lease;
    EXPECT_EQ(ErrorReason(Client::Connect(server_.target(), options).status()), "INVALID_FIELD");
  }
  options.session_lease = seconds(30);
  options.client_name = std::string(129, 'n');
  EXPECT_EQ(ErrorReason(Client::Connect(server_.target(), options).status()), "INVALID_FIELD");
}

TEST_F(ClientRetry, TargetsThatAreNoneAreSaidBeforeAnythingIsTried) {
  const std::string long_name(108, 'x');
  for (const std::string& target : std::vector<std::string>{
           "", "localhost", "localhost:", "localhost:0", "localhost:65536", "localhost:https", ":50051", "host name:1", "::1:50051",
           "[::1]", "http://localhost:50051", "dns:///localhost", "a:1,b:2", "unix:", "unix-abstract:", "unix://tmp/s.sock",
           "unix:" + long_name, "unix-abstract:" + long_name}) {
    const absl::Status status = Client::Connect(target).status();
    EXPECT_EQ(ErrorReason(status), "INVALID_FIELD") << target;
    EXPECT_NE(std::string(status.message()).find("got \"" + target + "\""), std::string::npos) << status;
  }
  ClientOptions hasty;
  hasty.connect_timeout = milliseconds(20);
  for (const std::string target : {"127.0.0.1:1", "localhost:1", "head_water.example.invalid:1", "[::1]:1", "dns:localhost:1",
                                   "dns:///localhost:1", "dns:///[::1]:1", "ipv4:127.0.0.1:1", "ipv6:[::1]:1",
                                   "unix:/nobody/is here", "unix:nobody", "unix:///nobody", "unix-abstract:headwater-nobody"}) {
    EXPECT_EQ(Client::Connect(target, hasty).status().code(), absl::StatusCode::kUnavailable) << target;
  }
}

TEST_F(ClientRetry, ConnectSaysWhyNobodyIsReached) {
  ClientOptions options;
  options.connect_timeout = milliseconds(300);
  const absl::Status nobody = Client::Connect("unix:/nobody/is here", options).status();
  EXPECT_EQ(nobody.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(nobody.message()).find("No such file or directory"), std::string::npos) << nobody;
  // A name that cannot be resolved, whatever resolver there is: a part of more than 63 bytes. A quarter of the time is for it.
  options.connect_timeout = seconds(8);
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status unresolved = Client::Connect(std::string(64, 'x') + ":1", options).status();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(6));
  EXPECT_EQ(unresolved.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(unresolved.message()).find("DNS resolution failed"), std::string::npos) << unresolved;
}

TEST_F(ClientRetry, WhatCannotBeReadIsRefusedBeforeAnythingIsSent) {
  Connect(Quick(1));
  TensorView nothing;
  nothing.element_count = 12;
  EXPECT_EQ(ErrorReason(head_->UploadWeights(HeadTensor::kWeight, nothing).status()), "INVALID_FIELD");
  EXPECT_EQ(ErrorReason(head_->ReplaceWeights(0, nothing).status()), "INVALID_FIELD");
  const std::vector<float> some(12);
  TensorView less = TensorView::Float32(some);
  less.element_count = -1;
  EXPECT_EQ(ErrorReason(head_->UploadWeights(HeadTensor::kWeight, less).status()), "INVALID_FIELD");
  RowsView on_device = RowsView::Float32(some, head_->spec().hidden_size);
  on_device.memory = Memory::kCuda;
  EXPECT_EQ(ErrorReason(head_->AddGradient(0, 0, on_device).status()), "INVALID_FIELD");
  EXPECT_EQ(server_.calls.load(), 0);
}

TEST_F(ClientRetry, ATimeThatIsOverIsNotTheDefault) {
  Connect(Quick(5));
  EXPECT_EQ(head_->Commit(0, 0, 1.0, {.timeout = milliseconds(-1)}).Get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(head_->Seal(0, 1, {}, {.timeout = milliseconds(-1)}).status().code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace headwater::e2e
