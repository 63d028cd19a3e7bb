// Heads: plans, admission, specifications, reading and writing tensors.
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/extreme_values.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

HeadSpec Spec(int64_t vocab_size, int64_t hidden_size, DataType type = DataType::kFloat32) {
  return {.vocab_size = vocab_size, .hidden_size = hidden_size, .data_type = type, .transform = {.valid_vocab_size = vocab_size}};
}

int64_t PlannedBytes(const MemoryPlan& plan, const std::string& purpose) {
  int64_t bytes = 0;
  for (const MemoryPlan::Item& item : plan.items) bytes += item.purpose == purpose ? item.bytes : 0;
  return bytes;
}

// At least the needed bytes, at most those and some padding.
void ExpectPlanned(const MemoryPlan& plan, const std::string& purpose, int64_t needed_bytes) {
  EXPECT_GE(PlannedBytes(plan, purpose), needed_bytes) << purpose;
  EXPECT_LE(PlannedBytes(plan, purpose), needed_bytes == 0 ? 0 : needed_bytes + needed_bytes / 8 + 65536) << purpose;
}

TEST(MemoryPlan, AddsUp) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine();
  constexpr int64_t kElements = 3001 * 257;
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    for (const auto& [optimizer, state_tensors] : std::vector<std::pair<OptimizerSpec, int64_t>>{
             {std::monostate(), 0}, {AdamWSpec(), 2}, {SgdSpec{.momentum = 0.9}, 1}, {SgdSpec(), 0}}) {
      HeadSpec spec = Spec(3001, 257, type);
      spec.has_bias = true;
      spec.trainable = true;
      spec.staging_slots = 2;
      spec.optimizer = optimizer;
      ASSERT_OK_AND_ASSIGN(const MemoryPlan plan, engine->PlanHead(spec));
      SCOPED_TRACE(plan.ToString());
      ExpectPlanned(plan, "weight", kElements * ElementBytes(type));
      ExpectPlanned(plan, "bias", 3001 * ElementBytes(type));
      ExpectPlanned(plan, "grad_weight", kElements * 4);
      ExpectPlanned(plan, "grad_bias", 3001 * 4);
      ExpectPlanned(plan, "optimizer_state", state_tensors * (kElements + 3001) * 4);
      ExpectPlanned(plan, "staging", 2 * (kElements + 3001) * 4);
      if (optimizer.index() != 0) ExpectPlanned(plan, "master_weight", type == DataType::kFloat32 ? 0 : (kElements + 3001) * 4);
      EXPECT_GT(PlannedBytes(plan, "workspace"), 0);
      EXPECT_GE(plan.token_chunk_rows, 1);
      int64_t total = 0;
      for (const MemoryPlan::Item& item : plan.items) total += item.bytes;
      EXPECT_EQ(plan.total_bytes, total);

      ASSERT_OK_AND_ASSIGN(const std::unique_ptr<EngineHead> head, engine->CreateHead(spec));
      EXPECT_EQ(head->plan().total_bytes, total);
      EXPECT_TRUE(head->spec() == spec);
      EXPECT_EQ(engine->planned_bytes(), total);
    }
    EXPECT_EQ(engine->planned_bytes(), 0);
  }
}

TEST(MemoryPlan, FrozenHeadsPlanNoGradient) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine();
  ASSERT_OK_AND_ASSIGN(const MemoryPlan plan, engine->PlanHead(Spec(3001, 257)));
  for (const char* purpose : {"bias", "grad_weight", "grad_bias", "master_weight", "optimizer_state", "staging"}) {
    EXPECT_EQ(PlannedBytes(plan, purpose), 0) << purpose;
  }
}

TEST(MemoryPlan, ChunkRowsFollowTheOptions) {
  EngineOptions options = {.token_chunk_rows = 17};
  ASSERT_OK_AND_ASSIGN(const MemoryPlan plan, MakeSuiteEngine(options)->PlanHead(Spec(3001, 257)));
  EXPECT_EQ(plan.token_chunk_rows, 17);
  options.token_chunk_rows = 0;
  options.workspace_bytes = Suite().small_workspace_bytes;
  ASSERT_OK_AND_ASSIGN(const MemoryPlan small, MakeSuiteEngine(options)->PlanHead(Spec(3001, 257)));
  options.workspace_bytes = Suite().large_workspace_bytes;
  ASSERT_OK_AND_ASSIGN(const MemoryPlan large, MakeSuiteEngine(options)->PlanHead(Spec(3001, 257)));
  EXPECT_LT(small.token_chunk_rows, large.token_chunk_rows);
}

TEST(Admission, BudgetIsKept) {
  const HeadSpec spec = Spec(1000, 500);
  // Heads may share memory that the first one brings: the second adds as much as a further one would.
  int64_t one_head = 0;
  int64_t two_heads = 0;
  {
    const std::unique_ptr<LossEngine> unlimited = MakeSuiteEngine();
    const int64_t plan_bytes = unlimited->PlanHead(spec)->total_bytes;
    ASSERT_OK_AND_ASSIGN(const auto first, unlimited->CreateHead(spec));
    one_head = unlimited->planned_bytes();
    EXPECT_EQ(one_head, plan_bytes);
    ASSERT_OK_AND_ASSIGN(const auto second, unlimited->CreateHead(spec));
    two_heads = unlimited->planned_bytes();
  }
  const int64_t further_head = two_heads - one_head;
  ASSERT_GE(further_head, 1000 * 500 * 4);
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine(EngineOptions{.memory_budget_bytes = two_heads + further_head / 2});
  auto first = engine->CreateHead(spec);
  auto second = engine->CreateHead(spec);
  ASSERT_TRUE(first.ok() && second.ok());
  const auto refused = engine->CreateHead(spec);
  EXPECT_REASON(refused, kMemoryBudgetExceeded);
  // The message holds the plan.
  EXPECT_NE(std::string(refused.status().message()).find("weight"), std::string::npos) << refused.status();
  EXPECT_EQ(engine->planned_bytes(), two_heads);
  first->reset();
  EXPECT_EQ(engine->planned_bytes(), one_head);
  EXPECT_TRUE(engine->CreateHead(spec).ok());
}

// 10 TB, and sizes whose product wraps: refused before anything is allocated.
TEST(Admission, GiantHeadsAreRefusedAtOnce) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine();
  const auto start = std::chrono::steady_clock::now();
  for (const auto& [vocab_size, hidden_size] : {std::pair<int64_t, int64_t>{int64_t{1} << 28, 10240},
                                                {int64_t{1} << 30, int64_t{1} << 30},
                                                {(int64_t{1} << 31) - 1, (int64_t{1} << 31) - 1}}) {
    HeadSpec spec = Spec(vocab_size, hidden_size);
    spec.trainable = true;
    spec.optimizer = AdamWSpec{};
    spec.staging_slots = 2;
    const auto head = engine->CreateHead(spec);
    EXPECT_REASON(head, kMemoryBudgetExceeded);
    const auto plan = engine->PlanHead(spec);
    if (plan.ok()) {
      EXPECT_GT(plan->total_bytes, int64_t{10} << 40);
    }
  }
  EXPECT_LE(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
  EXPECT_EQ(engine->planned_bytes(), 0);
}

// integration_bad_input_test has a row for every field of a specification. Here are sizes that could reach beyond memory, and that
// an engine checks each part.
TEST(HeadSpec, BadOnesAreRefused) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine();
  const auto expect_refused = [&](const char* what, auto change) {
    HeadSpec spec = Spec(100, 10);
    spec.trainable = true;
    spec.optimizer = AdamWSpec{};
    change(spec);
    EXPECT_REASON(ValidateHeadSpec(spec), kInvalidField) << what;
    EXPECT_FALSE(engine->PlanHead(spec).ok()) << what;
    EXPECT_FALSE(engine->CreateHead(spec).ok()) << what;
  };
  EXPECT_TRUE(ValidateHeadSpec(Spec(1, 1)).ok());
  for (const int64_t size : {int64_t{0}, int64_t{-1}, int64_t{1} << 40}) {
    expect_refused("vocab_size", [&](HeadSpec& s) { s.vocab_size = s.transform.valid_vocab_size = size; });
    expect_refused("hidden_size", [&](HeadSpec& s) { s.hidden_size = size; });
  }
  expect_refused("valid_vocab_size", [](HeadSpec& s) { s.transform.valid_vocab_size = 101; });
  expect_refused("data_type", [](HeadSpec& s) { s.data_type = static_cast<DataType>(9); });
  expect_refused("staging_slots", [](HeadSpec& s) { s.staging_slots = -1; });
  expect_refused("softcap", [](HeadSpec& s) { s.transform.softcap = kNan; });
  expect_refused("optimizer", [](HeadSpec& s) { s.optimizer = SgdSpec{.momentum = 1}; });
}

TEST(EngineOptionsCheck, BadOnesAreRefused) {
  const auto expect_refused = [&](const char* what, auto change) {
    EngineOptions options;
    change(options);
    const auto engine = Suite().make(options);
    EXPECT_TRUE(!engine.ok() && HasReason(engine.status(), ErrorReason::kInvalidField)) << what << ": " << engine.status();
  };
  expect_refused("shard_count 0", [](EngineOptions& o) { o.shard_count = 0; });
  expect_refused("shard_count -1", [](EngineOptions& o) { o.shard_count = -1; });
  expect_refused("one weight for two shards", [](EngineOptions& o) {
    o.shard_count = 2;
    o.shard_weights = {1};
  });
  expect_refused("weight 0", [](EngineOptions& o) {
    o.shard_count = 2;
    o.shard_weights = {1, 0};
  });
  expect_refused("memory_budget_bytes -1", [](EngineOptions& o) { o.memory_budget_bytes = -1; });
  expect_refused("workspace_bytes -1", [](EngineOptions& o) { o.workspace_bytes = -1; });
  expect_refused("token_chunk_rows -1", [](EngineOptions& o) { o.token_chunk_rows = -1; });
  expect_refused("thread_count -1", [](EngineOptions& o) { o.thread_count = -1; });
}

TEST(HeadTensors, StartAtZeroAndHaveTheirTypes) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine();
  HeadSpec spec = Spec(31, 7, DataType::kBFloat16);
  spec.has_bias = true;
  spec.trainable = true;
  spec.optimizer = AdamWSpec{};
  ASSERT_OK_AND_ASSIGN(const auto head, engine->CreateHead(spec));
  for (int32_t value = 1; value <= 10; ++value) {
    const HeadTensor tensor = static_cast<HeadTensor>(value);
    const bool is_bias = value % 2 == 0;
    EXPECT_EQ(head->ElementCount(tensor), is_bias ? 31 : 31 * 7) << HeadTensorName(tensor);
    EXPECT_EQ(head->TensorDataType(tensor), value <= 2 ? DataType::kBFloat16 : DataType::kFloat32) << HeadTensorName(tensor);
    for (const double element : ReadTensorValues(*head, tensor)) EXPECT_EQ(element, 0.0) << HeadTensorName(tensor);
  }
}

// Any range of elements, across shards and in the middle of rows.
TEST(HeadTensors, RangesReadAndWriteAcrossShards) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine(EngineOptions{.shard_count = 4});
  HeadSpec spec = Spec(29, 5);
  spec.has_bias = true;
  spec.trainable = true;
  ASSERT_OK_AND_ASSIGN(const auto head, engine->CreateHead(spec));
  std::mt19937_64 random(4);
  for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kBias, HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
    const int64_t count = head->ElementCount(tensor);
    std::vector<float> mirror(static_cast<size_t>(count), 0.0f);
    for (int round = 0; round < 60; ++round) {
      const int64_t start = std::uniform_int_distribution<int64_t>(0, count)(random);
      const int64_t length = std::uniform_int_distribution<int64_t>(0, count - start)(random);
      const std::vector<double> values = RandomValues(random, length, 1, DataType::kFloat32);
      std::vector<float> piece(values.begin(), values.end());
      ASSERT_TRUE(head->WriteTensor(tensor, start, length, piece.data()).ok());
      std::copy(piece.begin(), piece.end(), mirror.begin() + start);
      const int64_t read_start = std::uniform_int_distribution<int64_t>(0, count)(random);
      std::vector<float> back(static_cast<size_t>(count - read_start) + 1, 7.0f);
      ASSERT_TRUE(head->ReadTensor(tensor, read_start, count - read_start, back.data()).ok());
      EXPECT_TRUE(std::equal(mirror.begin() + read_start, mirror.end(), back.begin()));
      EXPECT_EQ(back.back(), 7.0f) << "read past the range";
    }
  }
}

TEST(HeadTensors, RangesOutsideAreRefused) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine();
  HeadSpec spec = Spec(11, 3);
  spec.trainable = true;
  ASSERT_OK_AND_ASSIGN(const auto head, engine->CreateHead(spec));
  float element = 5;
  for (const auto& [start, count] :
       {std::pair<int64_t, int64_t>{-1, 1}, {33, 1}, {0, 34}, {0, -1}, {32, 2}, {kMost, kMost}, {1, kMost}}) {
    for (const absl::Status& status : {head->ReadTensor(HeadTensor::kWeight, start, count, &element),
                                       head->WriteTensor(HeadTensor::kGradWeight, start, count, &element)}) {
      EXPECT_TRUE(!status.ok() && HasReason(status, ErrorReason::kChunkOutOfRange)) << start << ", " << count << ": " << status;
    }
  }
  EXPECT_FALSE(head->ReadTensor(HeadTensor::kBias, 0, 1, &element).ok()) << "the head has no bias";
  EXPECT_EQ(element, 5);
}

// Masters and stored tensors follow each other, whichever is written.
TEST(HeadTensors, MastersFollow) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine();
  HeadSpec spec = Spec(11, 3, DataType::kBFloat16);
  spec.trainable = true;
  spec.optimizer = SgdSpec{};
  ASSERT_OK_AND_ASSIGN(const auto head, engine->CreateHead(spec));
  std::mt19937_64 random(4);
  const std::vector<double> weight = RandomValues(random, 33, 1, DataType::kBFloat16);
  WriteTensorValues(*head, HeadTensor::kWeight, weight);
  EXPECT_EQ(ReadTensorValues(*head, HeadTensor::kMasterWeight), weight);
  std::vector<double> master = weight;
  master[4] = 1 + 3 * 0x1p-8;  // halfway: to even
  master[5] = 1 + 0x1p-8;
  master[6] = 1 + 0x1.2p-8;
  WriteTensorValues(*head, HeadTensor::kMasterWeight, master);
  EXPECT_EQ(ReadTensorValues(*head, HeadTensor::kMasterWeight), master);
  std::vector<double> rounded = master;
  rounded[4] = 1 + 0x1p-6;
  rounded[5] = 1;
  rounded[6] = 1 + 0x1p-7;
  EXPECT_EQ(ReadTensorValues(*head, HeadTensor::kWeight), rounded);
}

TEST(Engine, SelfTestPasses) {
  for (const int32_t shard_count : {1, 2, 3, 7}) {
    const std::unique_ptr<LossEngine> engine = MakeSuiteEngine(EngineOptions{.shard_count = shard_count});
    const absl::Status status = SelfTest(*engine);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(engine->planned_bytes(), 0);
  }
}

TEST(Engine, DescribesItself) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine(EngineOptions{.shard_count = 2});
  EXPECT_FALSE(engine->name().empty());
  ASSERT_FALSE(engine->devices().empty());
  EXPECT_GT(engine->devices()[0].memory_budget_bytes, 0);
  EXPECT_EQ(engine->options().shard_count, 2);
  EXPECT_GT(engine->options().memory_budget_bytes, 0);
  EXPECT_GT(engine->options().thread_count, 0);
}

}  // namespace
}  // namespace headwater::testing
