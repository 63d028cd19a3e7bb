// Micro-batches and heads for the tests of server/heads.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HEADS_HEAD_TEST_UTIL_H_
#define HEADWATER_TESTS_UNIT_SERVER_HEADS_HEAD_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "server/heads/head.h"
#include "server/heads/steps/decide.h"
#include "server/heads/steps/submit.h"
#include "tests/unit/server/fake_engine.h"

namespace headwater::heads {

// Commit() and Discard() of a micro-batch of one head that no session owns.
inline absl::StatusOr<bool> CommitTo(const std::shared_ptr<Head>& head, const StepKey& key, int64_t micro_batch, int64_t attempt,
                                     double factor) {
  return Commit({{head, key}}, micro_batch, attempt, {factor, {}}, std::nullopt);
}
inline absl::StatusOr<bool> DiscardFrom(const std::shared_ptr<Head>& head, const StepKey& key, int64_t micro_batch,
                                        int64_t attempt) {
  return Discard({{head, key}}, micro_batch, attempt, std::nullopt);
}

}  // namespace headwater::heads

namespace headwater::testing {

// The sequencer of all heads that tests make without a registry.
std::shared_ptr<scheduler::Sequencer> TestSequencer();

// Fails unless `status` is OK, or has `reason`. For absl::Status and StatusOr alike.
#define EXPECT_OK(expression)                                                         \
  do {                                                                                \
    const absl::Status expect_ok_status = ::headwater::testing::ToStatus(expression); \
    EXPECT_TRUE(expect_ok_status.ok()) << expect_ok_status;                           \
  } while (false)
#define ASSERT_OK(expression)                                                         \
  do {                                                                                \
    const absl::Status assert_ok_status = ::headwater::testing::ToStatus(expression); \
    ASSERT_TRUE(assert_ok_status.ok()) << assert_ok_status;                           \
  } while (false)
#define EXPECT_REASON(expression, reason) \
  EXPECT_EQ(::headwater::testing::ReasonOf(expression), ErrorReasonName(ErrorReason::reason))

// Limits of a call whose client has gone.
inline scheduler::WaitLimits CancelledWait() {
  static scheduler::ThreadWaiter gone([] { return true; });
  return {absl::InfiniteFuture(), &gone};
}

inline absl::Status ToStatus(const absl::Status& status) { return status; }
template <typename T>
absl::Status ToStatus(const absl::StatusOr<T>& result) {
  return result.status();
}
// The reason's name, or "OK".
template <typename T>
std::string ReasonOf(const T& result) {
  const absl::Status status = ToStatus(result);
  return status.ok() ? "OK" : ErrorReasonName(GetErrorReason(status));
}

// The rows of a micro-batch: hidden states and targets.
struct Payload {
  std::vector<float> hidden;     // [row_count, hidden_size]
  std::vector<int32_t> targets;  // [row_count]
};

// A submission with the memory that it points to.
class MicroBatchCall {
 public:
  MicroBatchCall(const std::shared_ptr<heads::Head>& head, int64_t step, int64_t micro_batch, Payload payload);
  MicroBatchCall(const MicroBatchCall&) = delete;
  MicroBatchCall& operator=(const MicroBatchCall&) = delete;

  heads::Submission& submission() { return submission_; }
  heads::SubmittedTerm& term() { return submission_.terms[0]; }
  MicroBatchCall& Explicit();
  MicroBatchCall& Refuse();
  MicroBatchCall& FirstWins();
  MicroBatchCall& ForwardOnly();
  absl::StatusOr<heads::SubmissionOutcome> Run(LossEngine& engine, const std::function<bool()>& cancelled = nullptr);
  const std::vector<float>& grad_hidden() const { return grad_hidden_; }

 private:
  Payload payload_;
  std::vector<float> grad_hidden_;
  heads::Submission submission_;
};

// A digest of rows, for tests: equal payloads have equal ones.
// Normally distributed rows; every fifth is ignored.
Payload RandomPayload(uint64_t seed, int64_t row_count, int64_t vocab_size, int64_t hidden_size);

Digest DigestOf(const Payload& payload);

// Rows of a submission that flow: they are there at once, unless it is told otherwise.
class TestRows : public heads::IncomingRows {
 public:
  explicit TestRows(const Payload& payload) : digest_(DigestOf(payload)) {}

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

// A head with weights 0, 1, 2, ... (mod 7) on `engine`.
std::shared_ptr<heads::Head> MakeReadyHead(LossEngine& engine, const HeadSpec& spec, const std::string& id = "student",
                                           const heads::HeadLimits& limits = {});
absl::Status SetWeights(heads::Head& head, const std::vector<float>& weight, const std::vector<float>& bias = {});

std::vector<float> ReadGradWeight(const heads::Head& head);
std::vector<float> ReadWeight(const heads::Head& head);

// Runs `call` on a thread of its own; returns once it sleeps in there, because it waits for a lock, say. For calls that leave their
// mark before they wait. The test fails if it does not sleep within 20 s.
std::thread RunUntilItSleeps(std::function<void()> call);

// The step that `head` has open, with its epoch.
heads::StepKey KeyOf(const heads::Head& head);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_SERVER_HEADS_HEAD_TEST_UTIL_H_
