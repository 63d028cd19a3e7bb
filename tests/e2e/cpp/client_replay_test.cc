// Going on after the server's restart, against a scripted server: what is repeated, in which order, and when a lost step is final.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/client/client.h"
#include "tests/e2e/cpp/scripted_server.h"
#include "tests/e2e/cpp/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

constexpr int64_t kHiddenSize = 4;
constexpr int64_t kStep = 5;
// What takes longer hangs.
constexpr seconds kLimit{20};
// Of calls that are to end by their deadlines, once they wait for a recovery.
constexpr seconds kShort{3};
const std::string kOthersEpoch(16, 'o');
constexpr char kTakenByAnotherRun[] = "another run has taken the head since the server was started again";

// A server that knows epochs and restarts, and writes down what it accepted.
class ClientReplay : public testing::Test {
 protected:
  ClientReplay() {
    server_.WithState([](ScriptedServer::State& state) { state.open_step = kStep; });
    server_.compute_loss = [this](grpc::ServerContext* context, ScriptedServer::LossStream* stream) {
      v1::MicroBatchHeader header;
      std::string rows;
      v1::ComputeLossRequest request;
      while (stream->Read(&request)) {
        if (request.has_header()) header = request.header();
        rows += request.chunk().data();
      }
      const bool staged = header.commit_mode() == v1::COMMIT_MODE_EXPLICIT;
      const std::string call = absl::StrCat("loss ", header.micro_batch(), " ", Sum(rows));
      if (!AwaitRelease(*context, call)) return grpc::Status::CANCELLED;
      if (grpc::Status status = Accept(header.terms(0).head(), call); !status.ok()) return status;
      v1::ComputeLossResponse response;
      for (int i = 0; i < answered_terms_; ++i) response.mutable_summary()->add_terms();
      response.mutable_summary()->set_state(staged ? v1::CONTRIBUTION_STATE_STAGED : v1::CONTRIBUTION_STATE_COMMITTED);
      stream->Write(response);
      return grpc::Status::OK;
    };
    server_.commit = [this](const v1::CommitMicroBatchRequest& request) {
      return Accept(request.heads(0), absl::StrCat("commit ", request.micro_batch(), " ", request.factor()));
    };
    server_.discard = [this](const v1::DiscardMicroBatchRequest& request) {
      return Accept(request.heads(0), absl::StrCat("discard ", request.micro_batch()));
    };
    server_.add_gradient = [this](const v1::AddGradientHeader& header, const std::string& bytes) {
      return Accept(header.head(), absl::StrCat("gradient ", header.micro_batch(), " ", Sum(bytes)));
    };
    server_.seal = [this](const v1::SealStepRequest& request) { return Accept(request.head(), "seal"); };
    server_.apply = [this](const v1::ApplyOptimizerStepRequest& request) {
      grpc::Status status = Accept(request.head(), absl::StrCat("apply ", request.head().step()));
      if (status.ok()) server_.WithState([](ScriptedServer::State& state) { ++state.open_step; });
      return status;
    };
    server_.discard_gradient = [this](const v1::DiscardGradientRequest& request) {
      grpc::Status status = Accept(request.head(), absl::StrCat("discard gradient ", request.head().step()));
      if (status.ok()) server_.WithState([](ScriptedServer::State& state) { ++state.open_step; });
      return status;
    };
    Connect(1 << 20);
  }

  static ClientOptions Options(int64_t replay_bytes, std::optional<int64_t> replay_steps = std::nullopt) {
    ClientOptions options;
    options.replay_bytes = replay_bytes;
    options.replay_steps = replay_steps;
    options.retry = {.max_attempts = 3, .initial_backoff = milliseconds(1), .max_backoff = milliseconds(2)};
    return options;
  }
  void Connect(int64_t replay_bytes, std::optional<int64_t> replay_steps = std::nullopt) {
    client_.emplace(Value(Client::Connect(server_.target(), Options(replay_bytes, replay_steps))));
    head_.emplace(Value(client_->OpenHead("h")));
  }

  static double Sum(const std::string& bytes) {
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    double sum = 0;
    for (const float value : values) sum += value;
    return sum;
  }

  grpc::Status Accept(const v1::HeadStep& head, const std::string& call) {
    const ScriptedServer::State state = server_.WithState([](ScriptedServer::State& current) { return current; });
    if (head.head_epoch() != state.epoch && state.head_state != v1::HEAD_STATE_RESTORED) {
      return ErrorWithReason(grpc::StatusCode::ABORTED, "EPOCH_FENCED");
    }
    if (state.head_state == v1::HEAD_STATE_RESTORED) {
      Meet();
      return ErrorWithReason(
          grpc::StatusCode::ABORTED, "STEP_LOST", 0,
          {{"restoredStep", absl::StrCat(state.open_step)}, {"checkpoint", "newest"}, {"checkpoints", "newest=4,a=b=3,"}});
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!refused_.empty() && call.find(refused_) == 0) {
      return ErrorWithReason(grpc::StatusCode::ABORTED, "MICRO_BATCH_CONFLICT");
    }
    accepted_.push_back(call);
    return grpc::Status::OK;
  }

  // False: the client has ended the call while it was held.
  bool AwaitRelease(const grpc::ServerContext& context, const std::string& call) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (held_.empty() || call.find(held_) != 0) return true;
    is_held_ = true;
    changed_.notify_all();
    while (!held_.empty()) {
      if (context.IsCancelled()) {
        is_abandoned_ = true;
        changed_.notify_all();
        return false;
      }
      changed_.wait_for(lock, milliseconds(5));
    }
    return true;
  }
  void Meet() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++met_;
    changed_.notify_all();
    changed_.wait_for(lock, kLimit, [this] { return met_ >= meeting_; });
  }

  void Restart(int64_t open_step = kStep) {
    server_.WithState([open_step](ScriptedServer::State& state) {
      ++state.incarnation[0];
      state.epoch = std::string(16, 'r');
      state.recovers_epochs.clear();
      state.head_state = v1::HEAD_STATE_RESTORED;
      state.open_step = open_step;
      state.sessions.clear();
    });
    std::lock_guard<std::mutex> lock(mutex_);
    accepted_.clear();
  }

  // By a trainer that this client's connection knows nothing of; `recovers_epochs`: it goes on from there, else it is another run.
  void LetOthersTake(const std::string& epoch, const std::vector<std::string>& recovers_epochs = {}) {
    server_.WithState([&](ScriptedServer::State& state) {
      state.epoch = epoch;
      state.recovers_epochs = recovers_epochs;
      state.head_state = v1::HEAD_STATE_READY;
    });
  }
  std::vector<std::string> RecoversEpochs() {
    return server_.WithState([](ScriptedServer::State& state) { return state.recovers_epochs; });
  }

  std::vector<std::string> accepted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return accepted_;
  }
  void Refuse(const std::string& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    refused_ = call;
  }
  // Losses that begin so are not accepted before Release().
  void Hold(const std::string& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = call;
    is_held_ = is_abandoned_ = false;
  }
  bool WaitUntilHeld() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kLimit, [this] { return is_held_; });
  }
  // Until the client has ended one that was held.
  bool WaitUntilAbandoned() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kLimit, [this] { return is_abandoned_; });
  }
  void Release() {
    std::lock_guard<std::mutex> lock(mutex_);
    held_.clear();
    changed_.notify_all();
  }
  // The next `calls` that find their step lost are told so together.
  void LetMeet(int calls) {
    std::lock_guard<std::mutex> lock(mutex_);
    met_ = 0;
    meeting_ = calls;
  }
  size_t TakeCount() { return server_.CallsOf("TakeHead").size(); }

  // One row of four times `value`, which is overwritten as soon as the call has ended.
  Future<LossResult> Start(int64_t micro_batch, const std::vector<float>& rows, CommitMode commit = CommitMode::kEager,
                           int64_t step = kStep, const CallOptions& call = {}) {
    MicroBatchOptions options;
    options.step = step;
    options.micro_batch = micro_batch;
    options.commit = commit;
    options.return_grad_hidden = false;
    const std::vector<int32_t> targets = {1};
    return head_->CrossEntropy(RowsView::Float32(rows, kHiddenSize), targets, {}, options, call);
  }
  absl::Status Submit(int64_t micro_batch, float value, CommitMode commit = CommitMode::kEager, int64_t step = kStep) {
    std::vector<float> rows(kHiddenSize, value);
    const absl::Status status = Start(micro_batch, rows, commit, step).Get().status();
    std::fill(rows.begin(), rows.end(), -99.0F);
    return status;
  }
  absl::Status AddGradient(int64_t micro_batch, float value) {
    const std::vector<float> rows(2 * kHiddenSize, value);
    return head_->AddGradient(kStep, micro_batch, RowsView::Float32(rows, kHiddenSize)).status();
  }

  ScriptedServer server_;
  std::optional<Client> client_;
  std::optional<Head> head_;
  std::mutex mutex_;
  std::vector<std::string> accepted_;
  std::string refused_;
  std::condition_variable changed_;
  std::string held_;
  bool is_held_ = false;
  bool is_abandoned_ = false;
  int meeting_ = 0;
  int met_ = 0;
  std::atomic<int> answered_terms_ = 1;
};

TEST_F(ClientReplay, OpenStepIsRepeatedInItsOrderAndTheCallGoesOn) {
  ASSERT_TRUE(Submit(0, 1).ok());
  ASSERT_TRUE(Submit(1, 2, CommitMode::kExplicit).ok());
  ASSERT_TRUE(Submit(2, 3, CommitMode::kExplicit).ok());
  ASSERT_TRUE(head_->Commit(kStep, 1, 0.5).Get().ok());
  ASSERT_TRUE(head_->Discard(kStep, 2).Get().ok());
  ASSERT_TRUE(AddGradient(9, 4).ok());
  ASSERT_TRUE(Submit(3, 5, CommitMode::kExplicit).ok());
  Restart();
  EXPECT_TRUE(head_->Commit(kStep, 3).Get().ok());
  EXPECT_THAT(accepted(),
              ElementsAre("loss 0 4", "loss 1 8", "commit 1 0.5", "discard 2", "gradient 9 32", "loss 3 20", "commit 3 1"));
  EXPECT_EQ(TakeCount(), 1u);
  EXPECT_EQ(head_->epoch(), "s" + std::string(15, 'r'));

  // Blocking calls recover as well, and what came after the first restart is in the log too.
  ASSERT_TRUE(head_->Seal(kStep, std::vector<int64_t>{0, 1, 3, 9}).ok());
  Restart();
  EXPECT_TRUE(head_->Apply(kStep, {.learning_rate = 0.1}).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 1 8", "commit 1 0.5", "discard 2", "gradient 9 32", "loss 3 20",
                                      "commit 3 1", "seal", "apply 5"));
  EXPECT_EQ(TakeCount(), 2u);

  // The step is closed: nothing of it is repeated in the next one.
  ASSERT_TRUE(Submit(0, 7, CommitMode::kEager, kStep + 1).ok());
  Restart(kStep + 1);
  EXPECT_TRUE(Submit(1, 8, CommitMode::kEager, kStep + 1).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 28", "loss 1 32"));
}

// A seal that waits for a micro-batch is answered as soon as that is committed, and its own answer comes later, with its gradient.
TEST_F(ClientReplay, WhatAStepConsistsOfIsRepeatedBeforeItsSeal) {
  const std::vector<float> rows(kHiddenSize, 1);
  ASSERT_TRUE(Submit(0, 2).ok());
  Hold("loss 1");
  Future<LossResult> late = Start(1, rows);
  ASSERT_TRUE(WaitUntilHeld());
  ASSERT_TRUE(head_->Seal(kStep, std::vector<int64_t>{0, 1}).ok());
  Release();
  ASSERT_TRUE(late.Get().ok());
  Restart();
  EXPECT_TRUE(head_->Apply(kStep, {.learning_rate = 0.1}).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 8", "loss 1 4", "seal", "apply 5"));
}

// Once it is discarded up to an attempt, a later one is another micro-batch.
TEST_F(ClientReplay, ALateDiscardLeavesTheNextAttemptInTheLog) {
  ASSERT_TRUE(Submit(2, 1, CommitMode::kExplicit).ok());
  std::promise<void> reached, go_on;
  const auto accept = std::exchange(server_.discard, [&](const v1::DiscardMicroBatchRequest& request) {
    reached.set_value();
    go_on.get_future().wait();
    return Accept(request.heads(0), absl::StrCat("discard ", request.micro_batch()));
  });
  Future<DiscardResult> discarded = head_->Discard(kStep, 2);
  reached.get_future().wait();
  const std::vector<float> rows(kHiddenSize, 3);
  MicroBatchOptions again;
  again.step = kStep;
  again.micro_batch = 2;
  again.attempt = 1;
  again.return_grad_hidden = false;
  const std::vector<int32_t> targets = {1};
  ASSERT_TRUE(head_->CrossEntropy(RowsView::Float32(rows, kHiddenSize), targets, {}, again).Get().ok());
  go_on.set_value();
  ASSERT_TRUE(discarded.Get().ok());
  server_.discard = accept;
  Restart();
  EXPECT_TRUE(head_->Seal(kStep, std::vector<int64_t>{2}).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 2 12", "discard 2", "seal"));
}

TEST_F(ClientReplay, HeadThatCameBackAtAnOlderStepIsLost) {
  ASSERT_TRUE(Submit(0, 1).ok());
  Restart(kStep - 1);
  const absl::Status status = Submit(1, 2);
  EXPECT_EQ(ErrorReason(status), "STEP_LOST");
  ASSERT_TRUE(RestoredFrom(status).has_value());
  EXPECT_EQ(RestoredFrom(status)->restored_step, kStep - 1);
  EXPECT_EQ(RestoredFrom(status)->checkpoint, "newest");
  EXPECT_EQ(RestoredFrom(status)->checkpoints, (std::vector<std::pair<std::string, int64_t>>{{"newest", 4}}));
  EXPECT_THAT(std::string(status.message()), HasSubstr("no replay: "));
  EXPECT_EQ(TakeCount(), 0u);
  EXPECT_TRUE(accepted().empty());
  // By hand it goes on.
  EXPECT_EQ(Value(head_->Take()).open_step, kStep - 1);
  EXPECT_TRUE(Submit(0, 1, CommitMode::kEager, kStep - 1).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4"));
}

TEST_F(ClientReplay, ClosedStepsAreRepeatedToo) {
  ASSERT_TRUE(Submit(0, 1).ok());
  ASSERT_TRUE(head_->Apply(kStep, {.learning_rate = 0.1, .expected = ExpectedMicroBatches(int64_t{1})}).ok());
  ASSERT_TRUE(Submit(0, 2, CommitMode::kEager, kStep + 1).ok());
  ASSERT_TRUE(head_->DiscardGradient(kStep + 1).ok());
  ASSERT_TRUE(Submit(0, 3, CommitMode::kEager, kStep + 2).ok());
  ASSERT_TRUE(head_->Seal(kStep + 2, 1).ok());
  ASSERT_TRUE(head_->Apply(kStep + 2, {.learning_rate = 0.1}).ok());
  ASSERT_TRUE(Submit(0, 4, CommitMode::kEager, kStep + 3).ok());
  Restart(kStep);
  ASSERT_TRUE(Submit(1, 5, CommitMode::kEager, kStep + 3).ok());
  const std::vector<std::string> all = {"loss 0 4",  "seal", "apply 5", "loss 0 8",  "discard gradient 6",
                                        "loss 0 12", "seal", "apply 7", "loss 0 16", "loss 1 20"};
  EXPECT_EQ(accepted(), all);
  // Also from the middle; and the client has not forgotten where it was.
  Restart(kStep + 2);
  ASSERT_TRUE(head_->Seal(kStep + 3, 2).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 12", "seal", "apply 7", "loss 0 16", "loss 1 20", "seal"));
  Restart(kStep);
  ASSERT_TRUE(head_->Apply(kStep + 3, {.learning_rate = 0.1}).ok());
  EXPECT_EQ(accepted().size(), all.size() + 2);
  EXPECT_EQ(accepted().back(), "apply 8");
}

TEST_F(ClientReplay, TheLogReachesBackAsFarAsItIsAskedToAndHasRoom) {
  for (const bool by_steps : {true, false}) {
    SCOPED_TRACE(by_steps);
    server_.WithState([](ScriptedServer::State& state) {
      state.open_step = kStep;
      state.head_state = v1::HEAD_STATE_READY;
    });
    Connect(by_steps ? 1 << 20 : 1000, by_steps ? std::optional<int64_t>(1) : std::nullopt);
    int64_t step = kStep;
    for (; step < kStep + 10; ++step) {
      ASSERT_TRUE(Submit(0, 1, CommitMode::kEager, step).ok());
      ASSERT_TRUE(head_->Apply(step, {.learning_rate = 0.1, .expected = ExpectedMicroBatches(int64_t{1})}).ok());
    }
    ASSERT_TRUE(Submit(0, 1, CommitMode::kEager, step).ok());
    Restart(step - 2);
    const absl::Status status = by_steps ? Submit(1, 1, CommitMode::kEager, step) : absl::OkStatus();
    if (by_steps) {
      EXPECT_EQ(ErrorReason(status), "STEP_LOST");
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("reaches back to step ", step - 1)));
      Restart(step - 1);
    }
    EXPECT_TRUE(Submit(1, 1, CommitMode::kEager, step).ok());
    Restart(kStep);
    EXPECT_EQ(ErrorReason(Submit(2, 1, CommitMode::kEager, step)), "STEP_LOST");
  }
}

TEST_F(ClientReplay, WithoutReplayALostStepIsFinal) {
  Connect(0);
  ASSERT_TRUE(Submit(0, 1).ok());
  Restart();
  EXPECT_EQ(ErrorReason(Submit(1, 2)), "STEP_LOST");
  EXPECT_EQ(TakeCount(), 0u);
  EXPECT_LE(server_.CallsOf("GetServerInfo").size(), 3u);  // by the paths of rows; with replay each call of a head would ask
}

TEST_F(ClientReplay, StepThatDoesNotFitIsLostAndTheNextOneIsKept) {
  Connect(1000);
  for (int64_t i = 0; i < 20; ++i) ASSERT_TRUE(Submit(i, 1).ok());
  Restart();
  const absl::Status status = Submit(20, 2);
  EXPECT_EQ(ErrorReason(status), "STEP_LOST");
  EXPECT_THAT(std::string(status.message()), HasSubstr("replay_bytes"));
  EXPECT_EQ(TakeCount(), 0u);

  Value(head_->Take());
  ASSERT_TRUE(Submit(0, 1).ok());
  Restart();
  EXPECT_TRUE(Submit(1, 2).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 1 8"));
}

TEST_F(ClientReplay, FencedWithoutARestartIsFinal) {
  ASSERT_TRUE(Submit(0, 1).ok());
  LetOthersTake(kOthersEpoch);
  const std::string epoch = head_->epoch();
  EXPECT_EQ(ErrorReason(Submit(1, 2)), "EPOCH_FENCED");
  EXPECT_EQ(ErrorReason(head_->Seal(kStep, 2).status()), "EPOCH_FENCED");
  EXPECT_EQ(head_->epoch(), epoch);
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4"));
}

TEST_F(ClientReplay, FencingStandsThoughTheServerWentWhileTheHeadWasTaken) {
  ASSERT_TRUE(Submit(0, 1).ok());
  Restart();
  std::atomic<bool> went = false;
  server_.take_head = [this, &went] {
    if (!went.exchange(true)) Restart();
  };
  ASSERT_TRUE(Submit(1, 2).ok());
  ASSERT_TRUE(went);
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 1 8"));
  // Another run takes the head: the epoch that is fenced is of the process that answers now, and no restart explains it.
  LetOthersTake(kOthersEpoch);
  EXPECT_EQ(ErrorReason(Submit(2, 3)), "EPOCH_FENCED");
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 1 8"));
}

TEST_F(ClientReplay, TrainerThatComesSecondJoinsTheOneThatTookTheHead) {
  ASSERT_TRUE(Submit(0, 1).ok());
  Restart();
  LetOthersTake(kOthersEpoch, {"of an earlier life", head_->epoch()});
  EXPECT_TRUE(Submit(1, 2).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 1 8"));
  EXPECT_EQ(TakeCount(), 0u);
  EXPECT_EQ(head_->epoch(), kOthersEpoch);
}

// Its micro-batches are another run's no more than its epoch is, however often the server is started again.
TEST_F(ClientReplay, TrainerWhoseHeadAnotherRunHasTakenSinceTheRestartIsFencedForGood) {
  ASSERT_TRUE(Submit(0, 1).ok());
  const std::string epoch = head_->epoch();
  Restart();
  LetOthersTake(kOthersEpoch, {"of another run"});
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = Submit(1, 2);
    EXPECT_EQ(ErrorReason(status), "EPOCH_FENCED");
    EXPECT_THAT(std::string(status.message()), HasSubstr(kTakenByAnotherRun));
  }
  EXPECT_EQ(ErrorReason(head_->Seal(kStep, 2).status()), "EPOCH_FENCED");
  Restart();
  const absl::Status status = Submit(1, 2);
  EXPECT_EQ(ErrorReason(status), "STEP_LOST");
  EXPECT_THAT(std::string(status.message()), HasSubstr(kTakenByAnotherRun));
  EXPECT_EQ(head_->epoch(), epoch);
  EXPECT_EQ(TakeCount(), 0u);
  EXPECT_TRUE(accepted().empty());
  // By hand it goes on, as a new run, with nothing of what was before.
  Value(head_->Take());
  EXPECT_TRUE(RecoversEpochs().empty());
  ASSERT_TRUE(Submit(2, 3).ok());
  const std::string taken = head_->epoch();
  Restart();
  EXPECT_TRUE(Submit(3, 4).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 2 12", "loss 3 16"));
  EXPECT_THAT(RecoversEpochs(), ElementsAre(taken));
}

TEST_F(ClientReplay, TrainerThatIsOvertakenAtTheTakeJoinsItsOwnRunAlone) {
  for (const bool of_one_run : {true, false}) {
    SCOPED_TRACE(of_one_run);
    server_.take_head = nullptr;
    LetOthersTake(std::string(16, 'e'));
    Connect(1 << 20);
    ASSERT_TRUE(Submit(0, 1).ok());
    const std::string epoch = head_->epoch();
    Restart();
    server_.take_head = [&] { LetOthersTake(kOthersEpoch, {of_one_run ? epoch : "of another run"}); };
    const absl::Status status = Submit(1, 2);
    if (of_one_run) {
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 1 8"));
    } else {
      EXPECT_EQ(ErrorReason(status), "STEP_LOST");
      EXPECT_THAT(std::string(status.message()), HasSubstr(kTakenByAnotherRun));
      EXPECT_TRUE(accepted().empty());
    }
    EXPECT_EQ(head_->epoch(), of_one_run ? kOthersEpoch : epoch);
  }
}

// One of them makes no call between two restarts. Whichever takes the head after the second one, the other one joins.
TEST_F(ClientReplay, TrainersOfOneRunMeetThoughOneHasMissedARestart) {
  const std::string first_epoch(16, 'e');
  for (const bool late_one_takes : {false, true}) {
    SCOPED_TRACE(late_one_takes);
    LetOthersTake(first_epoch);
    Connect(1 << 20);
    Client other = Value(Client::Connect(server_.target(), Options(1 << 20)));
    Head late = Value(other.OpenHead("h"));
    const std::vector<float> rows(2 * kHiddenSize, 1);
    const auto add = [&](int64_t micro_batch) {
      return late.AddGradient(kStep, micro_batch, RowsView::Float32(rows, kHiddenSize)).status();
    };
    ASSERT_TRUE(Submit(0, 1).ok());
    ASSERT_TRUE(add(8).ok());
    Restart();
    ASSERT_TRUE(Submit(1, 2).ok());
    const std::string second_epoch = head_->epoch();
    Restart();
    server_.WithState([](ScriptedServer::State& state) { state.epoch = std::string(16, 'u'); });  // not that of before again
    const size_t taken_before = TakeCount();
    if (late_one_takes) {
      EXPECT_TRUE(add(9).ok());
    }
    EXPECT_TRUE(Submit(2, 3).ok());
    if (!late_one_takes) {
      EXPECT_TRUE(add(9).ok());
    }
    EXPECT_EQ(TakeCount(), taken_before + 1);
    EXPECT_THAT(accepted(), UnorderedElementsAre("loss 0 4", "loss 1 8", "loss 2 12", "gradient 8 8", "gradient 9 8"));
    EXPECT_EQ(late.epoch(), head_->epoch());
    if (late_one_takes) {
      EXPECT_THAT(RecoversEpochs(), ElementsAre(first_epoch));
    } else {
      EXPECT_THAT(RecoversEpochs(), ElementsAre(first_epoch, second_epoch));
    }
  }
}

// As many as the server takes, the newest of them.
TEST_F(ClientReplay, OfManyRestartsTheLastOnesAreKnown) {
  constexpr int kRestarts = 20, kKnown = 16;
  ASSERT_TRUE(Submit(0, 1).ok());
  std::vector<std::string> epochs;
  for (int i = 0; i < kRestarts; ++i) {
    epochs.push_back(head_->epoch());
    Restart();
    server_.WithState([i](ScriptedServer::State& state) { state.epoch = std::string(16, static_cast<char>('A' + i)); });
    ASSERT_TRUE(Submit(i + 1, 2).ok());
  }
  EXPECT_EQ(RecoversEpochs(), std::vector<std::string>(epochs.end() - kKnown, epochs.end()));
}

TEST_F(ClientReplay, StepThatCannotBeRepeatedWholeStaysLost) {
  ASSERT_TRUE(Submit(0, 1).ok());
  ASSERT_TRUE(Submit(1, 2).ok());
  Restart();
  Refuse("loss 1");
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = Submit(2, 3);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("MICRO_BATCH_CONFLICT"));
  }
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 0 4"));
  Refuse("");
  EXPECT_TRUE(Submit(2, 3).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 0 4", "loss 0 4", "loss 1 8", "loss 2 12"));
}

// A repetition would read other weights, or name a head that is gone.
TEST_F(ClientReplay, StepWithAHeadThatGotAnotherStateIsLostForTheOthersToo) {
  const std::vector<float> rows(kHiddenSize, 1);
  const std::vector<int32_t> targets = {1};
  for (const bool teaches : {true, false}) {
    SCOPED_TRACE(teaches);
    server_.WithState([](ScriptedServer::State& state) {
      state.open_step = kStep;
      state.head_state = v1::HEAD_STATE_READY;
    });
    Connect(1 << 20);
    Head other = Value(client_->OpenHead("other"));
    MicroBatchOptions options;
    options.step = kStep;
    options.micro_batch = 0;
    options.return_grad_hidden = false;
    std::vector<LossTerm> terms(teaches ? 1 : 2);
    for (LossTerm& term : terms) term.targets = targets;
    if (teaches) {
      terms[0].loss = JsdOptions();
      terms[0].teacher = other;
      terms[0].teacher_hidden = RowsView::Float32(rows, kHiddenSize);
    } else {
      terms[1].head = other;
    }
    answered_terms_ = static_cast<int>(terms.size());
    Value(head_->Multi(RowsView::Float32(rows, kHiddenSize), terms, options).Get());
    answered_terms_ = 1;
    Value(other.Take());
    Restart();
    const absl::Status status = Submit(1, 2);
    EXPECT_EQ(ErrorReason(status), "STEP_LOST");
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("reaches back to step ", kStep + 1)));
    EXPECT_TRUE(accepted().empty());
  }
}

// They are gone with the server, and whoever has sent them does not know.
TEST_F(ClientReplay, StepWithRowsOfAJoinedTeacherIsLostAndTheNextOneIsKept) {
  const std::vector<float> rows(kHiddenSize, 1);
  JoinedTeacherOptions joined;
  joined.join_key = "key";
  joined.total_rows = 1;
  MicroBatchOptions options;
  options.step = kStep;
  options.micro_batch = 1;
  options.return_grad_hidden = false;
  Head teacher = Value(client_->OpenHead("teacher"));
  ASSERT_TRUE(Submit(0, 1).ok());
  Value(head_->Jsd(RowsView::Float32(rows, kHiddenSize), teacher, joined, {}, {}, options).Get());
  ASSERT_TRUE(Submit(2, 1).ok());
  Restart();
  const absl::Status status = Submit(3, 2);
  EXPECT_EQ(ErrorReason(status), "STEP_LOST");
  EXPECT_THAT(std::string(status.message()), HasSubstr("joined teacher"));
  EXPECT_EQ(TakeCount(), 0u);
  EXPECT_TRUE(accepted().empty());

  Value(head_->Take());
  ASSERT_TRUE(Submit(0, 1).ok());
  Restart();
  EXPECT_TRUE(Submit(1, 2).ok());
  EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 1 8"));
}

TEST_F(ClientReplay, HandlesOnOneHeadAreBroughtBackTogether) {
  ASSERT_TRUE(Submit(0, 1).ok());
  {
    Head gone = Value(client_->OpenHead("h"));
    const std::vector<float> rows(2 * kHiddenSize, 2);
    ASSERT_TRUE(gone.AddGradient(kStep, 1, RowsView::Float32(rows, kHiddenSize)).ok());
  }
  Head other = Value(client_->OpenHead("h"));
  ASSERT_TRUE(other.Seal(kStep, 2).ok());
  Restart();
  ASSERT_TRUE(head_->Apply(kStep, {.learning_rate = 0.1}).ok());
  const std::vector<std::string> step = {"loss 0 4", "gradient 1 16", "seal", "apply 5"};
  EXPECT_EQ(accepted(), step);
  EXPECT_EQ(other.epoch(), head_->epoch());
  // Both go on, without another recovery.
  ASSERT_TRUE(other.DiscardGradient(kStep + 1).ok());
  ASSERT_TRUE(Submit(0, 3, CommitMode::kEager, kStep + 2).ok());
  EXPECT_EQ(TakeCount(), 1u);
  EXPECT_EQ(accepted().size(), step.size() + 2);
}

TEST_F(ClientReplay, HandleThatTakesTheHeadFencesTheOthers) {
  Head other = Value(client_->OpenHead("h"));
  ASSERT_TRUE(Submit(0, 1).ok());
  Value(other.Take());
  EXPECT_NE(other.epoch(), head_->epoch());
  EXPECT_EQ(ErrorReason(Submit(1, 2)), "EPOCH_FENCED");
  // What the fenced one has done went with its epoch, and is not repeated for anybody.
  Head opened = Value(client_->OpenHead("h"));
  const std::vector<float> rows(2 * kHiddenSize, 2);
  ASSERT_TRUE(other.AddGradient(kStep, 1, RowsView::Float32(rows, kHiddenSize)).ok());
  Restart();
  const absl::Status status = Submit(2, 3);
  EXPECT_EQ(ErrorReason(status), "STEP_LOST");
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("reaches back to step ", kStep + 1)));
  EXPECT_TRUE(opened.Seal(kStep, 1).ok());
  EXPECT_THAT(accepted(), ElementsAre("gradient 1 16", "seal"));
  EXPECT_EQ(opened.epoch(), other.epoch());
}

TEST_F(ClientReplay, ManyCallsInFlightRecoverOnce) {
  ASSERT_TRUE(Submit(100, 1).ok());
  Restart();
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < 8; ++i) rows.emplace_back(kHiddenSize, static_cast<float>(i));
  std::vector<Future<LossResult>> futures;
  for (int i = 0; i < 8; ++i) futures.push_back(Start(i, rows[static_cast<size_t>(i)]));
  for (Future<LossResult>& future : futures) EXPECT_TRUE(future.Get().ok());
  EXPECT_EQ(TakeCount(), 1u);
  const std::vector<std::string> calls = accepted();
  ASSERT_EQ(calls.size(), 9u);
  EXPECT_EQ(calls[0], "loss 100 4");  // nothing slips in before the repetition
}

TEST_F(ClientReplay, CallsThatWaitForARecoveryEndByThemselves) {
  ASSERT_TRUE(Submit(0, 1).ok());
  Restart();
  Hold("loss 0");
  const std::vector<float> rows(kHiddenSize, 1);
  Future<LossResult> recovering = Start(1, rows);
  EXPECT_TRUE(WaitUntilHeld());
  Future<LossResult> patient = Start(2, rows);
  Future<LossResult> late = Start(3, rows, CommitMode::kEager, kStep, {.timeout = kShort});
  Future<CommitResult> late_commit = head_->Commit(kStep, 4, 1.0, {.timeout = kShort});
  Future<LossResult> cancelled = Start(5, rows, CommitMode::kExplicit);
  EXPECT_FALSE(cancelled.WaitFor(milliseconds(50)));
  cancelled.Cancel();
  EXPECT_TRUE(cancelled.WaitFor(kLimit));
  EXPECT_TRUE(late.WaitFor(kLimit));
  EXPECT_TRUE(late_commit.WaitFor(kLimit));
  EXPECT_EQ(ErrorReason(head_->Seal(kStep, 1, {}, {.timeout = milliseconds(50)}).status()), "DEADLINE_EXCEEDED");
  EXPECT_FALSE(patient.Ready());
  EXPECT_FALSE(recovering.Ready());
  Release();
  EXPECT_EQ(cancelled.Get().status().code(), absl::StatusCode::kCancelled);
  for (const absl::Status& status : {late.Get().status(), late_commit.Get().status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_EQ(ErrorReason(status), "DEADLINE_EXCEEDED");
  }
  EXPECT_TRUE(recovering.Get().ok());
  EXPECT_TRUE(patient.Get().ok());
  EXPECT_THAT(accepted(), UnorderedElementsAre("loss 0 4", "loss 1 4", "loss 2 4"));
  EXPECT_EQ(accepted()[0], "loss 0 4");
}

TEST_F(ClientReplay, RecoveryEndsWithItsCallAndAnotherCallTakesItOver) {
  enum class End { kCancelled, kDeadline, kDeadlineOfABlockingCall };
  const std::vector<float> rows(kHiddenSize, 1);
  for (const End end : {End::kCancelled, End::kDeadline, End::kDeadlineOfABlockingCall}) {
    SCOPED_TRACE(static_cast<int>(end));
    server_.WithState([](ScriptedServer::State& state) {
      state.head_state = v1::HEAD_STATE_READY;
      state.epoch = std::string(16, 'e');
    });
    Connect(1 << 20);
    ASSERT_TRUE(Submit(0, 1).ok());
    ASSERT_TRUE(Submit(1, 2, CommitMode::kExplicit).ok());
    const size_t taken_before = TakeCount();
    Restart();
    Hold("loss 1");
    std::future<absl::Status> ended = std::async(std::launch::async, [&] {
      if (end == End::kDeadlineOfABlockingCall) return head_->Seal(kStep, 1, {}, {.timeout = kShort}).status();
      const CallOptions call = {.timeout = end == End::kDeadline ? milliseconds(kShort) : milliseconds(0)};
      Future<LossResult> future = Start(2, rows, CommitMode::kEager, kStep, call);
      EXPECT_TRUE(WaitUntilHeld());
      if (end == End::kCancelled) future.Cancel();
      return future.Get().status();
    });
    EXPECT_TRUE(WaitUntilHeld());
    Future<LossResult> next = Start(3, rows);
    EXPECT_TRUE(WaitUntilAbandoned());
    EXPECT_EQ(ended.wait_for(kLimit), std::future_status::ready);
    EXPECT_FALSE(next.Ready());
    Release();
    const absl::Status status = ended.get();
    const bool is_cancelled = end == End::kCancelled;
    EXPECT_EQ(status.code(), is_cancelled ? absl::StatusCode::kCancelled : absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_EQ(ErrorReason(status), is_cancelled ? "CANCELLED" : "DEADLINE_EXCEEDED");
    EXPECT_TRUE(next.Get().ok());
    EXPECT_THAT(accepted(), ElementsAre("loss 0 4", "loss 0 4", "loss 1 8", "loss 3 4"));
    EXPECT_EQ(TakeCount(), taken_before + 1);
  }
}

TEST_F(ClientReplay, CancellationEndsWhateverTheRecoveryWaitsFor) {
  const std::vector<float> rows(kHiddenSize, 1);
  ASSERT_TRUE(AddGradient(0, 1).ok());
  Restart();
  // An answer.
  std::promise<void> takes;
  std::promise<void> goes_on;
  server_.take_head = [&] {
    takes.set_value();
    goes_on.get_future().wait_for(2 * kLimit);
  };
  Future<LossResult> taking = Start(1, rows);
  EXPECT_EQ(takes.get_future().wait_for(kLimit), std::future_status::ready);
  taking.Cancel();
  EXPECT_TRUE(taking.WaitFor(kLimit));
  goes_on.set_value();
  EXPECT_EQ(ErrorReason(taking.Get().status()), "CANCELLED");

  // The time of a repetition that the server has put off.
  server_.take_head = nullptr;
  std::promise<void> refuses;
  std::atomic<bool> refused = false;
  server_.add_gradient = [&](const v1::AddGradientHeader&, const std::string&) {
    if (!refused.exchange(true)) refuses.set_value();
    return ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", milliseconds(2 * kLimit).count());
  };
  Restart();
  Future<LossResult> pausing = Start(2, rows);
  EXPECT_EQ(refuses.get_future().wait_for(kLimit), std::future_status::ready);
  EXPECT_FALSE(pausing.WaitFor(milliseconds(50)));
  pausing.Cancel();
  EXPECT_TRUE(pausing.WaitFor(kLimit));
  EXPECT_EQ(ErrorReason(pausing.Get().status()), "CANCELLED");
}

// Whichever of them recovers.
TEST_F(ClientReplay, CallsThatLoseTheirStepTogetherEndByThemselves) {
  ASSERT_TRUE(Submit(0, 1).ok());
  const std::vector<float> rows(kHiddenSize, 1);
  Restart();
  LetMeet(5);
  Hold("loss 0");
  std::future<absl::Status> late_seal =
      std::async(std::launch::async, [&] { return head_->Seal(kStep, 1, {}, {.timeout = kShort}).status(); });
  Future<LossResult> late = Start(1, rows, CommitMode::kEager, kStep, {.timeout = kShort});
  Future<CommitResult> late_commit = head_->Commit(kStep, 2, 1.0, {.timeout = kShort});
  Future<LossResult> cancelled = Start(3, rows);
  Future<LossResult> patient = Start(4, rows);
  EXPECT_TRUE(WaitUntilHeld());
  cancelled.Cancel();
  EXPECT_TRUE(cancelled.WaitFor(kLimit));
  EXPECT_TRUE(late.WaitFor(kLimit));
  EXPECT_TRUE(late_commit.WaitFor(kLimit));
  EXPECT_EQ(late_seal.wait_for(kLimit), std::future_status::ready);
  EXPECT_FALSE(patient.Ready());
  Release();
  EXPECT_EQ(cancelled.Get().status().code(), absl::StatusCode::kCancelled);
  for (const absl::Status& status : {late.Get().status(), late_commit.Get().status(), late_seal.get()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  }
  EXPECT_TRUE(patient.Get().ok());
  EXPECT_EQ(accepted().front(), "loss 0 4");
  EXPECT_EQ(accepted().back(), "loss 4 4");
  EXPECT_EQ(TakeCount(), 1u);
}

}  // namespace
}  // namespace headwater::e2e
