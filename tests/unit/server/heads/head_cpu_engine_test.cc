// Head on the real CPU engine: what the fake engine's whole numbers cannot show.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <thread>

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

std::unique_ptr<LossEngine> NewEngine(int32_t shards) {
  EngineOptions options;
  options.shard_count = shards;
  options.thread_count = 2;
  options.token_chunk_rows = 5;
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

Payload RandomPayload(uint64_t seed) { return headwater::testing::RandomPayload(seed, kRows, kVocab, kWidth); }

// ||a - b|| / ||b||.
double Difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

class HeadCpuEngineTest : public ::testing::TestWithParam<int32_t> {
 protected:
  std::shared_ptr<Head> NewHead(LossEngine& engine, const HeadSpec& spec) {
    absl::StatusOr<std::shared_ptr<Head>> head =
        Head::Create({kDefaultTenant, "student"}, spec, engine, HeadLimits(), TestSequencer());
    EXPECT_OK(head);
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal(0, 0.3f);
    std::vector<float> weight(static_cast<size_t>(kVocab * kWidth));
    for (float& value : weight) value = normal(random);
    std::vector<float> bias(spec.has_bias ? static_cast<size_t>(kVocab) : 0);
    for (float& value : bias) value = normal(random);
    EXPECT_OK(SetWeights(**head, weight, bias));
    return *head;
  }
  absl::Status TrainStep(const std::shared_ptr<Head>& head, LossEngine& engine, uint64_t seed) {
    const StepKey key = KeyOf(*head);
    for (int64_t id = 0; id < 2; ++id) {
      const auto outcome = MicroBatchCall(head, key.step, id, RandomPayload(seed + static_cast<uint64_t>(id))).Run(engine);
      if (!outcome.ok()) return outcome.status();
    }
    return head->Apply(key, int64_t{2}, Rate(0.01, 1)).status();
  }

  std::unique_ptr<LossEngine> engine_ = NewEngine(GetParam());
};

TEST_P(HeadCpuEngineTest, StagedAndDirectAddTheSame) {
  const std::shared_ptr<Head> direct = NewHead(*engine_, Spec());
  const std::shared_ptr<Head> staged = NewHead(*engine_, Spec());
  const Payload payload = RandomPayload(1);
  ASSERT_OK(MicroBatchCall(direct, 0, 0, payload).Run(*engine_));
  ASSERT_OK(MicroBatchCall(staged, 0, 0, payload).Explicit().Run(*engine_));
  EXPECT_EQ(ReadGradWeight(*staged), std::vector<float>(static_cast<size_t>(kVocab * kWidth)));
  ASSERT_OK(CommitTo(staged, KeyOf(*staged), 0, 0, 0.5));
  std::vector<float> half = ReadGradWeight(*direct);
  for (float& value : half) value *= 0.5f;
  EXPECT_LE(Difference(ReadGradWeight(*staged), half), 1e-6);
  EXPECT_GT(staged->GradientNorm(KeyOf(*staged))->norm_squared, 0);
}

TEST_P(HeadCpuEngineTest, WhatIsNotAddedLeavesTheAccumulatorBitwise) {
  const std::shared_ptr<Head> head = NewHead(*engine_, Spec());
  const Payload payload = RandomPayload(1);
  ASSERT_OK(MicroBatchCall(head, 0, 0, payload).Run(*engine_));
  const std::vector<float> before = ReadGradWeight(*head);
  // A replay, another payload, a discarded one, a cancelled one, a wrong target, a refused NaN, a forward pass.
  EXPECT_TRUE(MicroBatchCall(head, 0, 0, payload).Run(*engine_)->replayed);
  EXPECT_TRUE(MicroBatchCall(head, 0, 0, RandomPayload(2)).FirstWins().Run(*engine_)->payload_differs);
  EXPECT_REASON(MicroBatchCall(head, 0, 0, RandomPayload(2)).Run(*engine_), kMicroBatchConflict);
  ASSERT_OK(MicroBatchCall(head, 0, 1, RandomPayload(3)).Explicit().Run(*engine_));
  EXPECT_TRUE(*DiscardFrom(head, KeyOf(*head), 1, 0));
  int asked = 0;
  EXPECT_REASON(MicroBatchCall(head, 0, 2, RandomPayload(4)).Explicit().Run(*engine_, [&asked] { return ++asked == 2; }),
                kCancelled);
  Payload wrong = RandomPayload(5);
  wrong.targets[kRows - 1] = kVocab;
  EXPECT_REASON(MicroBatchCall(head, 0, 3, wrong).Run(*engine_), kTargetOutOfVocab);
  Payload non_finite = RandomPayload(6);
  non_finite.hidden[0] = std::nanf("");
  EXPECT_REASON(MicroBatchCall(head, 0, 3, non_finite).Refuse().Run(*engine_), kNonFiniteValues);
  EXPECT_OK(MicroBatchCall(head, 0, 3, RandomPayload(7)).ForwardOnly().Run(*engine_));
  EXPECT_EQ(ReadGradWeight(*head), before);
  EXPECT_EQ(head->Describe().state, HeadState::kReady);
  // All slots are free again.
  for (int64_t id = 10; id < 10 + Spec().staging_slots; ++id) {
    EXPECT_OK(MicroBatchCall(head, 0, id, payload).Explicit().Run(*engine_));
  }
  ASSERT_OK(head->DiscardGradient(KeyOf(*head)));
  EXPECT_EQ(ReadGradWeight(*head), std::vector<float>(before.size()));
}

TEST_P(HeadCpuEngineTest, RowsThatFlowAddWhatWholeOnesDo) {
  const std::shared_ptr<Head> flowing = NewHead(*engine_, Spec());
  const std::shared_ptr<Head> whole = NewHead(*engine_, Spec());
  for (int64_t id = 0; id < 3; ++id) {
    const Payload payload = RandomPayload(static_cast<uint64_t>(id));
    TestRows rows(payload);
    MicroBatchCall flows(flowing, 0, id, payload), comes(whole, 0, id, payload);
    flows.submission().incoming = &rows;
    flows.submission().engine_digests = true;
    if (id == 2) flows.Explicit(), comes.Explicit();
    ASSERT_OK_AND_ASSIGN(const auto flowed, flows.Run(*engine_), came = comes.Run(*engine_));
    ASSERT_OK(came);
    EXPECT_EQ(rows.awaited.back(), kRows);
    EXPECT_EQ(rows.ready.back(), kRows);
    EXPECT_EQ(flows.grad_hidden(), comes.grad_hidden());
    EXPECT_EQ(flowed.terms[0].loss_sum, came->terms[0].loss_sum);
    DigestBuilder digest;
    digest.AddRows(0, 0, kRows, kWidth * int64_t{sizeof(float)}, payload.hidden.data());
    EXPECT_EQ(rows.engine_digest, digest.Finish("header"));
  }
  for (const std::shared_ptr<Head>& head : {flowing, whole}) EXPECT_TRUE(*CommitTo(head, KeyOf(*head), 2, 0, 0.5));
  EXPECT_EQ(ReadGradWeight(*flowing), ReadGradWeight(*whole));
}

TEST_P(HeadCpuEngineTest, RowsThatEndBeforeTheDecisionLeaveTheAccumulatorBitwise) {
  const std::shared_ptr<Head> head = NewHead(*engine_, Spec());
  ASSERT_OK(MicroBatchCall(head, 0, 0, RandomPayload(1)).Run(*engine_));
  const std::vector<float> before = ReadGradWeight(*head);
  for (const bool is_explicit : {false, true}) {
    for (int how = 0; how < 3; ++how) {
      const Payload payload = RandomPayload(2);
      TestRows rows(payload);
      MicroBatchCall call(head, 0, 1, payload);
      if (is_explicit) call.Explicit();
      call.submission().incoming = &rows;
      if (how == 0) rows.on_await = [](int64_t) { return MakeError(ErrorReason::kStripeLost, "a stripe broke"); };
      if (how == 1) rows.on_finish = [] { return MakeError(ErrorReason::kProtocolViolation, "rows are missing"); };
      if (how == 2) rows.Stall();
      const auto outcome = call.Run(*engine_);
      EXPECT_EQ(outcome.ok() && outcome->needs_all_rows, how == 2) << outcome.status();
      EXPECT_EQ(ReadGradWeight(*head), before) << is_explicit << how;
      EXPECT_EQ(head->Describe().state, HeadState::kReady);
    }
  }
  EXPECT_OK(MicroBatchCall(head, 0, 1, RandomPayload(2)).Run(*engine_));
}

TEST_P(HeadCpuEngineTest, SmallMicroBatchesOfOneHeadMayComeTogether) {
  const std::shared_ptr<Head> together = NewHead(*engine_, Spec());
  const std::shared_ptr<Head> apart = NewHead(*engine_, Spec());
  constexpr int64_t kCalls = 8;
  std::vector<std::thread> threads;
  for (int64_t id = 0; id < kCalls; ++id) {
    ASSERT_OK(MicroBatchCall(apart, 0, id, RandomPayload(static_cast<uint64_t>(id))).Run(*engine_));
    threads.emplace_back(
        [&, id] { EXPECT_OK(MicroBatchCall(together, 0, id, RandomPayload(static_cast<uint64_t>(id))).Run(*engine_)); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_OK(together->Seal(KeyOf(*together), int64_t{kCalls}));
  EXPECT_LE(Difference(ReadGradWeight(*together), ReadGradWeight(*apart)), 1e-6);  // their order is open
}

TEST_P(HeadCpuEngineTest, ANonFiniteGradientIsRefusedAndDiscarded) {
  const std::shared_ptr<Head> head = NewHead(*engine_, Spec());
  const std::vector<float> weight = ReadWeight(*head);
  Payload payload = RandomPayload(1);
  payload.hidden[3] = std::numeric_limits<float>::infinity();
  ASSERT_OK_AND_ASSIGN(const auto outcome, MicroBatchCall(head, 0, 0, payload).Run(*engine_));
  EXPECT_GE(outcome.terms[0].non_finite_row_count, 1);
  EXPECT_REASON(head->Apply(KeyOf(*head), int64_t{1}, ApplyArguments()), kNonFiniteGradient);
  EXPECT_EQ(ReadWeight(*head), weight);
  ASSERT_OK(head->DiscardGradient(KeyOf(*head)));
  EXPECT_EQ(head->GradientNorm(KeyOf(*head))->non_finite_count, 0);
  EXPECT_OK(TrainStep(head, *engine_, 9));
}

TEST_P(HeadCpuEngineTest, ARestoredRunContinuesBitwise) {
  const TemporaryDirectory directory;
  const std::unique_ptr<checkpoint::CheckpointStore> store = *checkpoint::CheckpointStore::Open(directory.path());
  for (const DataType data_type : {DataType::kFloat32, DataType::kBFloat16}) {
    HeadSpec spec = Spec();
    spec.data_type = data_type;
    const std::shared_ptr<Head> head = NewHead(*engine_, spec);
    ASSERT_OK(TrainStep(head, *engine_, 1));
    ASSERT_OK(TrainStep(head, *engine_, 3));
    ASSERT_OK(head->Save(head->Describe().epoch, *store, DataTypeName(data_type), false));
    ASSERT_OK(TrainStep(head, *engine_, 5));
    const std::vector<float> weight = ReadWeight(*head);

    const std::shared_ptr<Head> again = NewHead(*engine_, spec);
    ASSERT_OK(again->Restore(again->Describe().epoch, *store, DataTypeName(data_type)));
    EXPECT_EQ(again->Describe().open_step, 2);
    ASSERT_OK(TrainStep(again, *engine_, 5));
    EXPECT_EQ(ReadWeight(*again), weight);

    // On another number of shards sums are rounded in another order.
    const std::unique_ptr<LossEngine> other = NewEngine(GetParam() + 1);
    const std::shared_ptr<Head> elsewhere = NewHead(*other, spec);
    ASSERT_OK(elsewhere->Restore(elsewhere->Describe().epoch, *store, DataTypeName(data_type)));
    ASSERT_OK(TrainStep(elsewhere, *other, 5));
    EXPECT_LE(Difference(ReadWeight(*elsewhere), weight), 1e-5);
  }
}

TEST_P(HeadCpuEngineTest, MasterWeightsKeepWhatStorageRounds) {
  HeadSpec spec = Spec();
  spec.data_type = DataType::kBFloat16;
  const std::shared_ptr<Head> head = NewHead(*engine_, spec);
  const std::vector<float> fine(static_cast<size_t>(kVocab * kWidth), 1.001f);
  ASSERT_OK(SetWeights(*head, fine));
  EXPECT_EQ(ReadWeight(*head), fine);
  uint16_t stored;
  ASSERT_OK(head->ReadWeights(HeadTensor::kWeight, 0, 1, &stored, std::nullopt));
  EXPECT_EQ(stored, 0x3f80);  // 1.0
}

// One library rounds what the other does not.
TEST(HeadCpuEngineNumerics, NameOneDnnForTheHeadsThatItMultiplies) {
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
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shards, HeadCpuEngineTest, ::testing::Values(1, 3),
                         [](const auto& param_info) { return std::to_string(param_info.param); });

}  // namespace
}  // namespace headwater::heads
