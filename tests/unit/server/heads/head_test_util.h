// Micro-batches and heads for the tests of server/heads.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HEADS_HEAD_TEST_UTIL_H_
#define HEADWATER_TESTS_UNIT_SERVER_HEADS_HEAD_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/synchronization/notification.h"
#include "headwater/kernels/digest.h"
#include "server/heads/head.h"
#include "server/heads/steps/submit.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/run_threads.h"
#include "tests/unit/server/fake_engine.h"

namespace headwater::heads {

using testing::FakeEngine;
using testing::ReasonOf;
using testing::RunThreads;
using testing::SmallSpec;

// Commit() and Discard() of a micro-batch of one head that no session owns.
inline absl::StatusOr<bool> CommitTo(const std::shared_ptr<Head>& head, const StepKey& key, int64_t micro_batch, int64_t attempt,
                                     double factor) {
  return Commit({{head, key}}, micro_batch, attempt, {factor, {}}, std::nullopt);
}
inline absl::StatusOr<bool> DiscardFrom(const std::shared_ptr<Head>& head, const StepKey& key, int64_t micro_batch,
                                        int64_t attempt) {
  return Discard({{head, key}}, micro_batch, attempt, std::nullopt);
}

// The sequencer of all heads that tests make without a registry.
std::shared_ptr<scheduler::Sequencer> TestSequencer();

// Limits of a call whose client has gone.
inline scheduler::WaitLimits CancelledWait() {
  static scheduler::ThreadWaiter gone([] { return true; });
  return {absl::InfiniteFuture(), &gone};
}

// The rows of a micro-batch: hidden states and targets.
struct Payload {
  std::vector<float> hidden;     // [row_count, hidden_size]
  std::vector<int32_t> targets;  // [row_count]
};

// A submission with the memory that it points to.
class MicroBatchCall {
 public:
  MicroBatchCall(const std::shared_ptr<Head>& head, int64_t step, int64_t micro_batch, Payload payload);
  MicroBatchCall(const MicroBatchCall&) = delete;
  MicroBatchCall& operator=(const MicroBatchCall&) = delete;

  Submission& submission() { return submission_; }
  SubmittedTerm& term() { return submission_.terms[0]; }
  MicroBatchCall& Explicit();
  MicroBatchCall& Refuse();
  MicroBatchCall& FirstWins();
  MicroBatchCall& ForwardOnly();
  MicroBatchCall& Attempt(int64_t attempt);
  MicroBatchCall& Session(const std::optional<SessionId>& session);
  // EXPLICIT, and kept as rows by `hold`, whatever slots are free.
  using Hold = std::function<absl::StatusOr<std::shared_ptr<const void>>()>;
  MicroBatchCall& Held(Hold hold = HoldNothing);
  static absl::StatusOr<std::shared_ptr<const void>> HoldNothing() { return std::make_shared<const int>(0); }
  // With a teacher, whose rows are the call's own.
  MicroBatchCall& Teacher(const std::shared_ptr<Head>& teacher);
  absl::StatusOr<SubmissionOutcome> Run(LossEngine& engine, const std::function<bool()>& cancelled = nullptr);
  const std::vector<float>& grad_hidden() const { return grad_hidden_; }

 private:
  Payload payload_;
  std::vector<float> grad_hidden_;
  Submission submission_;
};

// Normally distributed rows; every fifth is ignored.
Payload RandomPayload(uint64_t seed, int64_t row_count, int64_t vocab_size, int64_t hidden_size);
// A digest of rows, for tests: equal payloads have equal ones.
Digest DigestOf(const Payload& payload);

// Rows of a submission that flow. They are there at once unless `on_await` is set.
class TestRows : public IncomingRows {
 public:
  explicit TestRows(const Digest& digest) : digest_(digest) {}
  explicit TestRows(const Payload& payload) : TestRows(DigestOf(payload)) {}

  absl::Status AwaitRows(int64_t row_end) override {
    awaited.push_back(row_end);
    return on_await != nullptr ? on_await(row_end) : absl::OkStatus();
  }
  bool stalled() const override { return is_stalled; }
  absl::StatusOr<Digest> Finish(const DigestBuilder* rows) override {
    ++finishes;
    if (rows != nullptr) engine_digest = rows->Finish("header");
    if (on_finish != nullptr) {
      if (absl::Status status = on_finish(); !status.ok()) return status;
    }
    return digest_;
  }
  void GradHiddenReady(int64_t row_end) override { ready.push_back(row_end); }

  // Stalls at the second wait.
  void Stall() {
    on_await = [this](int64_t row_end) {
      if (row_end < 2) return absl::OkStatus();
      is_stalled = true;
      return MakeError(ErrorReason::kCancelled, "the rows stay away");
    };
  }

  std::function<absl::Status(int64_t)> on_await;
  std::function<absl::Status()> on_finish;
  bool is_stalled = false;
  std::vector<int64_t> awaited, ready;
  int finishes = 0;
  std::optional<Digest> engine_digest;

 private:
  const Digest digest_;
};

// SmallSpec() with another value of a field.
template <typename T>
HeadSpec SpecWith(T HeadSpec::*field, std::type_identity_t<T> value) {
  HeadSpec spec = SmallSpec();
  spec.*field = value;
  return spec;
}
// SmallSpec() for a head that is not trainable.
HeadSpec FrozenSpec();

// Arguments of an update.
ApplyArguments Rate(double learning_rate, std::optional<double> max_grad_norm = std::nullopt);

// A head with weights 0, 1, 2, ... (mod 7) on `engine`.
std::shared_ptr<Head> MakeReadyHead(LossEngine& engine, const HeadSpec& spec, const std::string& id = "student",
                                    const HeadLimits& limits = {});
// The same with normally distributed weights, of which each seed has others.
std::shared_ptr<Head> MakeRandomHead(LossEngine& engine, const HeadSpec& spec, const std::string& id = "student",
                                     const HeadLimits& limits = {});
void SetRandomWeights(Head& head, uint64_t seed);
absl::Status SetWeights(Head& head, const std::vector<float>& weight, const std::vector<float>& bias = {});

std::vector<float> ReadGradWeight(const Head& head);
std::vector<float> ReadWeight(const Head& head);

// Runs `call` on a thread of its own; returns once it sleeps in there, because it waits for a lock, say. For calls that leave their
// mark before they wait. The test fails if it does not sleep within 20 s.
std::thread RunUntilItSleeps(std::function<void()> call);

// The step that `head` has open, with its epoch.
StepKey KeyOf(const Head& head);

// The rows that most tests send to a head of SmallSpec(), whose gradient is the row itself, and the sums that this makes.
inline const Payload kRowOfToken2 = {{1, 2, 3}, {2}};
inline const Payload kRowOfToken4 = {{-5, 0, 7}, {4}};
// A gradient with one row.
inline std::vector<float> Gradient(int64_t token, const std::vector<float>& row) {
  std::vector<float> values(15);
  std::copy(row.begin(), row.end(), values.begin() + token * 3);
  return values;
}
// The state of a micro-batch in the open step; kNone if the step does not know it.
ContributionState StateOf(const Head& head, int64_t micro_batch);
// Adds a term: the same rows against `other`.
void AddSecondTerm(MicroBatchCall& call, const std::shared_ptr<Head>& other);

inline const absl::Status kEngineError = MakeError(ErrorReason::kEngineFailed, "the device is gone");
inline const absl::Status kNotReady = MakeError(ErrorReason::kShardNotReady, "a shard could not begin");

// A place where one thread stops until the test opens it.
class ThreadGate {
 public:
  // The first thread that comes here stops.
  void Stop() {
    if (is_passed_.exchange(true)) return;
    stopped_.Notify();
    open_.WaitForNotification();
  }
  void AwaitStopped() { stopped_.WaitForNotification(); }
  void Open() { open_.Notify(); }

 private:
  std::atomic<bool> is_passed_ = false;
  absl::Notification stopped_, open_;
};

// A tensor of one value; `before` is asked whenever a piece of it is read.
TensorUpdate Filled(HeadTensor tensor, float value, const std::function<absl::Status(int64_t start)>& before = nullptr);
// Sets the weights to 1, and stops at the gate meanwhile.
void SetSlowly(Head& head, ThreadGate& gate);

}  // namespace headwater::heads

#endif  // HEADWATER_TESTS_UNIT_SERVER_HEADS_HEAD_TEST_UTIL_H_
