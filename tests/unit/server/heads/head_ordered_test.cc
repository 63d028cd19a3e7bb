// Head in deterministic mode, on the CPU engine: bits that do not depend on who comes when; what waits, and for how long.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "head_test_util.h"
#include "headwater/kernels/product_rate.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "server/heads/weights/weight_tensors.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::heads {
namespace {

using headwater::testing::TemporaryDirectory;

constexpr int64_t kVocab = 37;
constexpr int64_t kWidth = 11;
constexpr int64_t kRows = 13;
constexpr int64_t kMicroBatches = 6;

// A shard's failure, when it is asked for.
std::atomic<bool> prepare_fails{false};
std::atomic<bool> act_fails{false};

std::unique_ptr<LossEngine> NewEngine(int32_t shards) {
  EngineOptions options;
  options.shard_count = shards;
  options.thread_count = 2;
  options.token_chunk_rows = 5;
  options.deterministic = true;
  options.shard_probe = [](ShardPhase phase, int32_t rank) {
    if (rank != 0) return absl::OkStatus();
    const bool fails = phase == ShardPhase::kPrepare ? prepare_fails : act_fails;
    return fails ? absl::UnavailableError("the test says so") : absl::OkStatus();
  };
  absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCpuEngine(options);
  EXPECT_OK(engine);
  return *std::move(engine);
}

HeadSpec Spec() {
  HeadSpec spec = SmallSpec(kVocab, kWidth);
  spec.has_bias = true;
  spec.optimizer = AdamWSpec();
  return spec;
}

Payload RandomPayload(uint64_t seed) { return headwater::heads::RandomPayload(seed, kRows, kVocab, kWidth); }

HeadLimits Deterministic(int64_t ordered_window = 1024) { return {.deterministic = true, .ordered_window = ordered_window}; }

bool HasItsTurn(const Head& head, const StepKey& key, int64_t micro_batch) { return head.AwaitTurn(key, micro_batch, {}).ok(); }

class HeadOrderedTest : public ::testing::TestWithParam<int32_t> {
 protected:
  std::shared_ptr<Head> NewHead(const HeadLimits& limits = Deterministic(), const std::string& id = "student") {
    return NewHead(*engine_, limits, id);
  }
  std::shared_ptr<Head> NewHead(LossEngine& engine, const HeadLimits& limits, const std::string& id = "student") {
    return MakeRandomHead(engine, Spec(), id, limits);
  }
  // A trainer's own part.
  static absl::StatusOr<bool> AddOwn(const std::shared_ptr<Head>& head, int64_t id, int64_t attempt = 0) {
    static const std::vector<float> rows(static_cast<size_t>(2 * kWidth), 0.37F);
    return head->AddGradient(KeyOf(*head), id, attempt, Digest{7},
                             GradientPart{.row_start = 3, .row_count = 2, .data = rows.data()}, nullptr);
  }
  // A call whose rows stay where they are until the test ends.
  MicroBatchCall& Call(const std::shared_ptr<Head>& head, int64_t id, int64_t attempt = 0) {
    absl::MutexLock lock(&mutex_);
    MicroBatchCall& call = calls_.emplace_back(head, KeyOf(*head).step, id, RandomPayload(static_cast<uint64_t>(id)));
    call.submission().hold = MicroBatchCall::HoldNothing;
    return call.Attempt(attempt);
  }
  absl::StatusOr<SubmissionOutcome> Submit(const std::shared_ptr<Head>& head, int64_t id, int64_t attempt = 0) {
    return Call(head, id, attempt).Run(*engine_);
  }
  // One of three kinds, by id: EAGER, EAGER that refuses what is not finite, EXPLICIT with a factor.
  void Add(const std::shared_ptr<Head>& head, int64_t id, LossEngine& engine) {
    MicroBatchCall& call = Call(head, id);
    if (id % 3 == 1) call.Refuse();
    if (id % 3 == 2) call.Explicit();
    ASSERT_OK_AND_ASSIGN(const auto outcome, call.Run(engine));
    EXPECT_EQ(outcome.form, ContributionForm::kHeld);
    EXPECT_EQ(outcome.state, id % 3 == 2 ? ContributionState::kStaged : ContributionState::kCommitted);
    if (id % 3 == 2) {
      EXPECT_TRUE(*CommitTo(head, KeyOf(*head), id, 0, 0.3));
    }
  }
  void Add(const std::shared_ptr<Head>& head, int64_t id) { Add(head, id, *engine_); }
  // Its own computation is done, and the addition fails; as everything does until `prepare_fails` is false again.
  void Delay(const std::shared_ptr<Head>& head, int64_t id) {
    MicroBatchCall& call = Call(head, id);
    call.submission().hold = [] {
      prepare_fails = true;
      return MicroBatchCall::HoldNothing();
    };
    ASSERT_OK(call.Run(*engine_));
  }
  // The gradient of ids 0 ... kMicroBatches - 1 in this order.
  std::vector<float> Reference() {
    const std::shared_ptr<Head> head = NewHead(Deterministic(), "reference");
    for (int64_t id = 0; id < kMicroBatches; ++id) Add(head, id);
    return ReadGradWeight(*head);
  }
  static int64_t Waiting(const Head& head) { return head.Describe().waiting_count; }

  ~HeadOrderedTest() override { prepare_fails = act_fails = false; }

  std::unique_ptr<LossEngine> engine_ = NewEngine(GetParam());

 private:
  absl::Mutex mutex_;
  std::deque<MicroBatchCall> calls_;
};

TEST_P(HeadOrderedTest, TheOrderOfArrivalDoesNotShow) {
  const std::vector<float> expected = Reference();
  std::vector<int64_t> order(kMicroBatches);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(3);
  std::reverse(order.begin(), order.end());
  for (int round = 0; round < 12; ++round) {
    const std::shared_ptr<Head> head = NewHead();
    for (const int64_t id : order) Add(head, id);
    EXPECT_EQ(Waiting(*head), 0);
    EXPECT_EQ(ReadGradWeight(*head), expected) << round;
    std::shuffle(order.begin(), order.end(), random);
  }
}

TEST_P(HeadOrderedTest, WithoutTheModeItShows) {
  // Else the test above could not fail.
  const std::shared_ptr<Head> forwards = NewHead(HeadLimits()), backwards = NewHead(HeadLimits());
  for (int64_t id = 0; id < kMicroBatches; ++id) {
    ASSERT_OK(Submit(forwards, id));
    ASSERT_OK(Submit(backwards, kMicroBatches - 1 - id));
  }
  EXPECT_NE(ReadGradWeight(*forwards), ReadGradWeight(*backwards));
}

TEST_P(HeadOrderedTest, AnyNumberOfTrainersGivesTheSameBits) {
  const std::vector<float> expected = Reference();
  for (const int64_t trainers : {1, 2, 5}) {
    const std::shared_ptr<Head> head = NewHead();
    RunThreads(trainers, [&](int64_t rank) {
      for (int64_t id = rank; id < kMicroBatches; id += trainers) Add(head, id);
    });
    ASSERT_OK(head->Seal(KeyOf(*head), kMicroBatches));
    EXPECT_EQ(ReadGradWeight(*head), expected) << trainers;
  }
}

TEST_P(HeadOrderedTest, ARestoredServerReplaysToTheSameBits) {
  const TemporaryDirectory directory;
  const std::unique_ptr<checkpoint::CheckpointStore> store = *checkpoint::CheckpointStore::Open(directory.path());
  const ApplyArguments arguments = Rate(0.01, 1);
  const auto step = [&](const std::shared_ptr<Head>& head, LossEngine& engine, std::vector<int64_t> order) {
    for (const int64_t id : order) Add(head, id, engine);
    ASSERT_OK(head->Apply(KeyOf(*head), kMicroBatches, arguments));
  };
  const std::shared_ptr<Head> head = NewHead();
  step(head, *engine_, {0, 1, 2, 3, 4, 5});
  ASSERT_OK(head->Save(head->Describe().epoch, *store, "one", false));
  step(head, *engine_, {0, 1, 2, 3, 4, 5});
  step(head, *engine_, {0, 1, 2, 3, 4, 5});

  const std::unique_ptr<LossEngine> other = NewEngine(GetParam());
  const std::shared_ptr<Head> again = NewHead(*other, Deterministic());
  ASSERT_OK(again->Restore(again->Describe().epoch, *store, "one"));
  EXPECT_EQ(again->Describe().restore_note, "");
  // Some of the step, which is lost with a second restart, and then all of it.
  Add(again, 3, *other);
  ASSERT_OK(again->Restore(again->Describe().epoch, *store, "one"));
  EXPECT_EQ(Waiting(*again), 0);
  step(again, *other, {5, 3, 4, 0, 1, 2});
  step(again, *other, {1, 0, 3, 2, 5, 4});
  EXPECT_EQ(ReadWeight(*again), ReadWeight(*head));
}

TEST_P(HeadOrderedTest, ACheckpointOfOtherSumsIsRefusedHereAndNotedElsewhere) {
  const TemporaryDirectory directory;
  const std::unique_ptr<checkpoint::CheckpointStore> store = *checkpoint::CheckpointStore::Open(directory.path());
  const std::shared_ptr<Head> head = NewHead();
  ASSERT_OK(head->Save(head->Describe().epoch, *store, "here", false));
  const std::unique_ptr<LossEngine> other = NewEngine(GetParam() + 1);
  const std::shared_ptr<Head> strict = NewHead(*other, Deterministic());
  const Epoch epoch = strict->Describe().epoch;
  const absl::Status refused = strict->Restore(epoch, *store, "here").status();
  EXPECT_REASON(refused, kCheckpointSpecMismatch);
  EXPECT_NE(refused.message().find("shards="), std::string::npos) << refused;
  EXPECT_EQ(strict->Describe().epoch, epoch);  // as it was
  const std::shared_ptr<Head> lenient = NewHead(*other, HeadLimits());
  ASSERT_OK(lenient->Restore(lenient->Describe().epoch, *store, "here"));
  EXPECT_NE(lenient->Describe().restore_note.find("shards="), std::string::npos);
  EXPECT_EQ(ReadWeight(*lenient), ReadWeight(*head));
}

// ---- gaps ------------------------------------------------------------------------------------------------------------

TEST_P(HeadOrderedTest, ApplySealsAndAddsWhatWaits) {
  const std::shared_ptr<Head> plain = NewHead(), head = NewHead();
  for (const int64_t id : {1, 3}) ASSERT_OK(Submit(plain, id));
  for (const int64_t id : {3, 1}) ASSERT_OK(Submit(head, id));
  const ApplyArguments arguments = Rate(0.1);
  const std::vector<int64_t> ids = {1, 3};
  ASSERT_OK(plain->Seal(KeyOf(*plain), ids));
  const auto expected = plain->Apply(KeyOf(*plain), std::nullopt, arguments);
  const StepKey key = KeyOf(*head);
  ASSERT_OK_AND_ASSIGN(const auto applied, head->Apply(key, ids, arguments));
  EXPECT_EQ(applied.global_grad_norm, expected->global_grad_norm);
  EXPECT_GT(applied.global_grad_norm, 0);
  EXPECT_EQ(ReadWeight(*head), ReadWeight(*plain));
  EXPECT_TRUE(head->Apply(key, ids, arguments)->replayed);
  // The next step begins at 0 again.
  ASSERT_OK(Submit(head, 0));
  EXPECT_EQ(Waiting(*head), 0);
}

TEST_P(HeadOrderedTest, ApplyAddsWhatASealCouldNot) {
  const std::shared_ptr<Head> head = NewHead();
  ASSERT_OK(Submit(head, 1));
  const StepKey key = KeyOf(*head);
  prepare_fails = true;
  EXPECT_REASON(head->Seal(key, std::vector<int64_t>{1}), kShardNotReady);
  EXPECT_REASON(head->Apply(key, std::nullopt, Rate(0.1)), kShardNotReady);
  prepare_fails = false;
  EXPECT_EQ(Waiting(*head), 1);
  ASSERT_OK_AND_ASSIGN(const auto applied, head->Apply(key, std::nullopt, Rate(0.1)));
  EXPECT_GT(applied.global_grad_norm, 0);
}

TEST_P(HeadOrderedTest, ASubmissionIsAnsweredBeforeNewWeightsAreSet) {
  const std::shared_ptr<Head> head = NewHead();
  ThreadGate gate;
  std::thread setter;
  MicroBatchCall& call = Call(head, 0);
  call.submission().hold = [&] {
    setter = RunUntilItSleeps([&] { SetSlowly(*head, gate); });
    return MicroBatchCall::HoldNothing();
  };
  ASSERT_OK(call.Run(*engine_));
  gate.Open();
  setter.join();
}

TEST_P(HeadOrderedTest, ADiscardedPredecessorIsWaitedForNoLonger) {
  const std::shared_ptr<Head> head = NewHead();
  const StepKey key = KeyOf(*head);
  std::thread waits = RunUntilItSleeps([&] { EXPECT_OK(head->AwaitTurn(key, 1, AsLongAsItTakes())); });
  EXPECT_FALSE(*DiscardFrom(head, key, 0, 0));  // never seen
  waits.join();
}

TEST_P(HeadOrderedTest, AParkedApplyKeepsItsPlace) {
  class Call : public scheduler::Waiter {
   public:
    Call() : Waiter(nullptr) {}
    WaitLimits limits() { return {absl::InfiniteFuture(), this}; }

   private:
    void Resume() override {}
  };
  const std::shared_ptr<Head> head = NewHead();
  const StepKey key = KeyOf(*head);
  for (const bool is_sealed : {false, true}) {
    const StepKey step = {key.epoch, is_sealed};
    ASSERT_OK(Submit(head, 0));
    if (is_sealed) ASSERT_OK(head->Seal(step, int64_t{1}));
    Call applies, discards;
    {
      ASSERT_OK_AND_ASSIGN(const scheduler::Admission reads, head->Admit(kReadsWeights, {}));
      const auto apply = [&] { return head->Apply(step, int64_t{1}, Rate(0.1), applies.limits()).status(); };
      EXPECT_TRUE(scheduler::IsParked(apply()));
      EXPECT_TRUE(scheduler::IsParked(head->DiscardGradient(step, discards.limits()).status()));
      EXPECT_TRUE(scheduler::IsParked(apply()));
    }
    EXPECT_TRUE(scheduler::IsParked(head->DiscardGradient(step, discards.limits()).status()));
    EXPECT_OK(head->Apply(step, int64_t{1}, Rate(0.1), applies.limits()));
    EXPECT_REASON(head->DiscardGradient(step, discards.limits()), kStepConflict);
  }
}

TEST_P(HeadOrderedTest, EveryContributionIsHeldUntilItIsAdded) {
  const std::shared_ptr<Head> head = NewHead();
  MicroBatchCall& call = Call(head, 1);
  const auto storage = std::make_shared<std::shared_ptr<const int>>(std::make_shared<const int>(0));
  const std::weak_ptr<const int> kept = *storage;
  call.submission().hold = nullptr;
  EXPECT_REASON(call.Run(*engine_), kStagingFull);
  call.submission().hold = [storage] { return std::exchange(*storage, nullptr); };
  ASSERT_OK(call.Run(*engine_));
  EXPECT_FALSE(kept.expired());
  ASSERT_OK(Submit(head, 0));
  EXPECT_EQ(Waiting(*head), 0);
  EXPECT_TRUE(kept.expired());
}

// ---- limits ----------------------------------------------------------------------------------------------------------

TEST_P(HeadOrderedTest, TheWindowIsFullAndTheFrontGetsThrough) {
  const std::shared_ptr<Head> head = NewHead(Deterministic(2));
  ASSERT_OK(Call(head, 2).Explicit().Run(*engine_));  // undecided ones count too
  ASSERT_OK(Submit(head, 3));
  EXPECT_ERROR(Submit(head, 4), kOrderedWindowFull, {"missing", "0"}, {"maximum", "2"}, {"retryAfterMs", "500"});
  // Its rows find room even where there is none.
  MicroBatchCall& front = Call(head, 0);
  front.submission().hold = []() -> absl::StatusOr<std::shared_ptr<const void>> {
    return MakeError(ErrorReason::kStagingFull, "no room");
  };
  int found_room = 0;
  front.submission().hold_first = [&found_room] { return ++found_room, std::make_shared<const int>(0); };
  ASSERT_OK(front.Run(*engine_));
  EXPECT_EQ(found_room, 1);
  MicroBatchCall& later = Call(head, 3, 1);
  later.submission().hold = front.submission().hold;
  EXPECT_TRUE(later.Run(*engine_)->replayed);  // needs none
  EXPECT_REASON(Submit(head, 4), kOrderedWindowFull);
  ASSERT_OK(Submit(head, 1));
  EXPECT_TRUE(*CommitTo(head, KeyOf(*head), 2, 0, 1));
  EXPECT_EQ(Waiting(*head), 0);
  EXPECT_OK(Submit(head, 4));
}

TEST_P(HeadOrderedTest, ATrainersOwnPartTakesItsTurn) {
  const std::shared_ptr<Head> plain = NewHead(), head = NewHead();
  ASSERT_OK(Submit(plain, 0));
  EXPECT_TRUE(*AddOwn(plain, 1));
  ASSERT_OK(Submit(plain, 2));

  ASSERT_OK(Submit(head, 2));
  EXPECT_REASON(AddOwn(head, 1), kOrderedWindowFull);
  EXPECT_FALSE(HasItsTurn(*head, KeyOf(*head), 1));
  EXPECT_REASON(head->AwaitTurn(KeyOf(*head), 1, {}), kDeadlineExceeded);
  EXPECT_OK(head->AwaitTurn(KeyOf(*head), 1, {.deadline = absl::InfiniteFuture(), .step_deadline = absl::InfinitePast()}));
  EXPECT_REASON(head->AwaitTurn(KeyOf(*head), 1, CancelledWait()), kCancelled);
  std::thread waiter([&] {
    EXPECT_OK(head->AwaitTurn(KeyOf(*head), 1, AsLongAsItTakes()));
    EXPECT_TRUE(*AddOwn(head, 1));
  });
  ASSERT_OK(Submit(head, 0));
  waiter.join();
  EXPECT_FALSE(*AddOwn(head, 1));
  EXPECT_EQ(Waiting(*head), 0);
  EXPECT_EQ(ReadGradWeight(*head), ReadGradWeight(*plain));
}

TEST_P(HeadOrderedTest, AnAttemptThatWasNotAddedLeavesItsGap) {
  const std::shared_ptr<Head> head = NewHead();
  EXPECT_FALSE(*DiscardFrom(head, KeyOf(*head), 0, 0));
  prepare_fails = true;
  EXPECT_REASON(AddOwn(head, 0, 1), kShardNotReady);
  prepare_fails = false;
  ASSERT_OK(Submit(head, 1));
  EXPECT_EQ(Waiting(*head), 1);  // the trainer has begun another attempt of 0, which is to come
  EXPECT_TRUE(*AddOwn(head, 0, 1));
  EXPECT_EQ(Waiting(*head), 0);
}

TEST_P(HeadOrderedTest, AMicroBatchWithoutMissingPredecessorsHasItsTurn) {
  const std::shared_ptr<Head> plain = NewHead(HeadLimits());
  EXPECT_TRUE(HasItsTurn(*plain, KeyOf(*plain), 5));
  EXPECT_OK(plain->AwaitTurn(KeyOf(*plain), 5, AsLongAsItTakes()));

  const std::shared_ptr<Head> head = NewHead();
  const StepKey key = KeyOf(*head);
  EXPECT_TRUE(HasItsTurn(*head, key, 0));
  for (const int64_t id : {1, 3, 9}) EXPECT_FALSE(HasItsTurn(*head, key, id)) << id;
  // The call itself is to find out that it is wrong.
  EXPECT_TRUE(HasItsTurn(*head, {NewEpoch(), key.step}, 1));
  EXPECT_TRUE(HasItsTurn(*head, {key.epoch, key.step + 1}, 1));
  ASSERT_OK(Submit(head, 3));
  EXPECT_TRUE(HasItsTurn(*head, key, 3));  // committed: a repeat waits for nothing
  ASSERT_OK(Submit(head, 0));
  EXPECT_FALSE(*DiscardFrom(head, key, 1, 0));
  ASSERT_OK(Submit(head, 2));
  EXPECT_TRUE(HasItsTurn(*head, key, 1));  // too late
  EXPECT_REASON(head->CheckAddGradient(key, 1, 1, 0, 1), kOrderPassed);
  EXPECT_FALSE(HasItsTurn(*head, key, 9));
  ASSERT_OK(head->Seal(key, std::vector<int64_t>{0, 2, 3}));
  EXPECT_TRUE(HasItsTurn(*head, key, 9));  // nothing comes any more

  const std::shared_ptr<Head> retired = NewHead(), lost = NewHead();
  const StepKey retired_key = KeyOf(*retired), lost_key = KeyOf(*lost);
  EXPECT_FALSE(HasItsTurn(*retired, retired_key, 1));
  retired->Retire();
  EXPECT_TRUE(HasItsTurn(*retired, retired_key, 1));
  EXPECT_FALSE(HasItsTurn(*lost, lost_key, 1));
  act_fails = true;
  EXPECT_REASON(lost->DiscardGradient(lost_key), kEngineFailed);
  EXPECT_TRUE(HasItsTurn(*lost, lost_key, 1));
}

// ---- several heads, teachers, failures -------------------------------------------------------------------------------

TEST_P(HeadOrderedTest, ATeacherThatChangesMeanwhileLosesTheStep) {
  const std::shared_ptr<Head> head = NewHead(), teacher = NewHead(Deterministic(), "teacher");
  MicroBatchCall& call = Call(head, 1);
  ASSERT_OK(call.Teacher(teacher).Run(*engine_));
  SetRandomWeights(*teacher, 8);
  EXPECT_REASON(Submit(head, 0), kEngineFailed);
  EXPECT_EQ(head->Describe().state, HeadState::kLost);
  EXPECT_EQ(Waiting(*head), 0);
}

TEST_P(HeadOrderedTest, OnlyItsOwnTeachersMatterToAHead) {
  const std::shared_ptr<Head> with = NewHead(), without = NewHead(Deterministic(), "without"),
                              teacher = NewHead(Deterministic(), "teacher");
  MicroBatchCall& call = Call(with, 1);
  SubmittedTerm second = call.term();
  second.head = without;
  second.head_epoch = without->Describe().epoch;
  call.Teacher(teacher).submission().terms.push_back(second);
  ASSERT_OK(call.Run(*engine_));
  SetRandomWeights(*teacher, 8);
  EXPECT_OK(Submit(without, 0));
  EXPECT_EQ(Waiting(*without), 0);
  EXPECT_REASON(Submit(with, 0), kEngineFailed);
}

TEST_P(HeadOrderedTest, ADecisionTellsThatTheAdditionLostTheHead) {
  for (const bool commits : {true, false}) {
    const std::shared_ptr<Head> head = NewHead();
    ASSERT_OK(Call(head, 0).Explicit().Run(*engine_));
    ASSERT_OK(Submit(head, 1));
    act_fails = true;
    const StepKey key = KeyOf(*head);
    EXPECT_REASON(commits ? CommitTo(head, key, 0, 0, 1) : DiscardFrom(head, key, 0, 0), kEngineFailed);
    act_fails = false;
    EXPECT_EQ(head->Describe().state, HeadState::kLost);
  }
}

TEST_P(HeadOrderedTest, ATrainersOwnPartAddsWhatWasDelayedFirst) {
  const std::shared_ptr<Head> plain = NewHead(), head = NewHead(Deterministic(1));
  ASSERT_OK(Submit(plain, 0));
  EXPECT_TRUE(*AddOwn(plain, 1));
  Delay(head, 0);
  EXPECT_EQ(Waiting(*head), 1);
  // Nothing is missing, so there is nothing to wait for; but it is not added before its predecessor.
  EXPECT_TRUE(HasItsTurn(*head, KeyOf(*head), 1));
  EXPECT_FALSE(HasItsTurn(*head, KeyOf(*head), 2));
  EXPECT_REASON(AddOwn(head, 1), kShardNotReady);
  // One that is to be refused needs nothing added.
  EXPECT_REASON(AddOwn(head, 0), kMicroBatchConflict);
  prepare_fails = false;
  EXPECT_TRUE(*AddOwn(head, 1));
  EXPECT_EQ(Waiting(*head), 0);
  EXPECT_FALSE(*AddOwn(head, 1));
  ASSERT_OK(head->Seal(KeyOf(*head), int64_t{2}));
  EXPECT_EQ(ReadGradWeight(*head), ReadGradWeight(*plain));
}

TEST_P(HeadOrderedTest, ASubmissionAddsWhatWasDelayedEvenIfTheWindowIsFull) {
  const std::shared_ptr<Head> head = NewHead(Deterministic(1)), plain = NewHead();
  for (int64_t id = 0; id < 2; ++id) ASSERT_OK(Submit(plain, id));
  Delay(head, 0);
  prepare_fails = false;
  EXPECT_REASON(Submit(head, 2), kOrderedWindowFull);
  MicroBatchCall& next = Call(head, 1);
  int64_t waiting = -1;
  next.submission().hold = [&] { return waiting = Waiting(*head), std::make_shared<const int>(0); };
  ASSERT_OK(next.Run(*engine_));
  EXPECT_EQ(waiting, 0);
  EXPECT_EQ(Waiting(*head), 0);
  EXPECT_EQ(ReadGradWeight(*head), ReadGradWeight(*plain));
}

// One library rounds what the other does not.
TEST(CpuEngineNumerics, NameOneDnnForTheHeadsThatItMultiplies) {
  for (const Bfloat16Products products : {Bfloat16Products::kOpenBlas, Bfloat16Products::kOneDnn}) {
    const bool is_onednn = products == Bfloat16Products::kOneDnn;
    if (is_onednn && MeasureCpuProductRate(1, products) == 0) continue;
    EngineOptions options;
    options.bfloat16_products = products;
    const std::unique_ptr<LossEngine> engine = *CreateCpuEngine(options);
    for (const DataType data_type : {DataType::kFloat32, DataType::kBFloat16}) {
      HeadSpec spec = Spec();
      spec.data_type = data_type;
      const std::string numerics = DescribeNumerics(*engine, **engine->CreateHead(spec));
      EXPECT_EQ(numerics.find("; bf16_products=onednn") != std::string::npos, is_onednn && data_type == DataType::kBFloat16)
          << numerics;
      EXPECT_NE(numerics.find("; threads="), std::string::npos) << numerics;
      EXPECT_NE(numerics.find("; device=" + engine->devices()[0].model), std::string::npos) << numerics;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shards, HeadOrderedTest, ::testing::Values(1, 3),
                         [](const auto& param_info) { return std::to_string(param_info.param); });

}  // namespace
}  // namespace headwater::heads
