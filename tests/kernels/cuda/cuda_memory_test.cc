// Device memory. Heads and micro-batches take as much as the plan says, whatever the number of rows, and nothing is allocated while
// a micro-batch is computed.
//
// Used memory is that of the whole device, so nothing else may run there. The baseline is an engine without heads.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/cuda/cuda_problem.h"
#include "tests/kernels/cuda/cuda_test_environment.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;
// The driver hands out memory in pieces of 2 MiB; each of a head's tensors may leave one unfilled.
constexpr int64_t kGranularityBytes = 32 * kMiB;

// The largest and the smallest use while it lives, looked at every half millisecond.
class MemoryWatch {
 public:
  MemoryWatch() : largest_(UsedBytes()), smallest_(largest_.load()) {
    thread_ = std::thread([this] {
      while (!done_) {
        Look();
        std::this_thread::sleep_for(std::chrono::microseconds(500));
      }
    });
  }
  ~MemoryWatch() { Stop(); }
  void Stop() {
    if (!thread_.joinable()) return;
    done_ = true;
    thread_.join();
    Look();
  }
  int64_t largest() const { return largest_; }
  int64_t smallest() const { return smallest_; }

 private:
  void Look() {
    const int64_t used = UsedBytes();
    if (used > largest_) largest_ = used;
    if (used < smallest_) smallest_ = used;
  }
  std::atomic<bool> done_{false};
  std::atomic<int64_t> largest_, smallest_;
  std::thread thread_;
};

int64_t PlannedFor(const MemoryPlan& plan, const std::string& purpose) {
  int64_t bytes = 0;
  for (const MemoryPlan::Item& item : plan.items) bytes += item.purpose == purpose ? item.bytes : 0;
  return bytes;
}

struct MemoryCase {
  int64_t vocab = 0;
  int64_t width = 0;
  int64_t workspace_bytes = 0;
  bool divergence = false;
  bool timed_search = false;
  std::string Name() const {
    std::ostringstream name;
    name << "v" << vocab << "_h" << width << "_" << workspace_bytes / kGiB << "gib_" << (divergence ? "jsd" : "ce");
    if (timed_search) name << "_timed";
    return name.str();
  }
};

std::vector<MemoryCase> MemoryCases() {
  std::vector<MemoryCase> cases;
  for (const auto& [vocab, width] : {std::pair<int64_t, int64_t>{128256, 4096}, {256000, 2304}}) {
    for (const int64_t workspace_bytes : {4 * kGiB, 2 * kGiB}) {
      for (const bool divergence : {false, true}) cases.push_back({vocab, width, workspace_bytes, divergence, false});
    }
  }
  cases.push_back({128256, 4096, 4 * kGiB, false, true});
  return cases;
}

// A micro-batch of zeros.
class ZeroRows {
 public:
  ZeroRows(const MemoryCase& shape, int64_t rows, MemorySpace memory)
      : rows_(rows), width_(shape.width), memory_(memory), targets_(static_cast<size_t>(rows)), token_loss_(targets_.size()) {
    const BufferKind kind = memory == MemorySpace::kDevice ? BufferKind::kDevice : BufferKind::kPinned;
    hidden_ = Buffer(kind, rows * width_ * 2);
    grad_hidden_ = Buffer(kind, rows * width_ * 2);
    if (memory == MemorySpace::kDevice) {
      CheckCuda(cudaMemset(hidden_.as<void>(), 0, static_cast<size_t>(hidden_.bytes())), "cudaMemset");
      CheckCuda(cudaDeviceSynchronize(), "cudaMemset");
    } else {
      std::memset(hidden_.as<void>(), 0, static_cast<size_t>(hidden_.bytes()));
    }
    for (size_t i = 0; i < targets_.size(); ++i) {
      targets_[i] = static_cast<int32_t>((static_cast<int64_t>(i) * 7919) % shape.vocab);
    }
  }

  // Fails the test unless the loss is that of equal logits.
  void Compute(LossEngine& engine, EngineHead& head, EngineHead* teacher) {
    LossTerm term = {.head = &head, .row_count = rows_, .targets = targets_, .token_loss = token_loss_.data()};
    MicroBatch micro_batch = {.hidden = {hidden_.as<void>(), rows_, width_, DataType::kBFloat16, memory_}};
    if (teacher != nullptr) {
      term.loss = JsdSpec();
      term.teacher_head = teacher;
      term.teacher_hidden = micro_batch.hidden;
    }
    micro_batch.terms = absl::MakeConstSpan(&term, 1);
    micro_batch.backward = true;
    micro_batch.grad_hidden = {grad_hidden_.as<void>(), rows_, width_, DataType::kBFloat16, memory_};
    micro_batch.grad_weight = GradWeightMode::kAccumulate;
    ASSERT_OK_AND_ASSIGN(const MicroBatchResult result, engine.Compute(micro_batch));
    const double each = teacher == nullptr ? std::log(static_cast<double>(head.spec().vocab_size)) : 0;
    const double expected = each * static_cast<double>(rows_);
    EXPECT_LE(std::abs(result.terms[0].loss_sum - expected), 1e-5 * expected + 1e-6);
    EXPECT_EQ(result.terms[0].valid_token_count, rows_);
  }

 private:
  const int64_t rows_, width_;
  const MemorySpace memory_;
  std::vector<int32_t> targets_;
  std::vector<float> token_loss_;
  Buffer hidden_, grad_hidden_;
};

class DeviceMemory : public ::testing::TestWithParam<MemoryCase> {};

TEST_P(DeviceMemory, MatchesThePlan) {
  const MemoryCase& param = GetParam();
  const std::string name = "cuda_memory_" + param.Name();
  const EngineOptions options = {.workspace_bytes = param.workspace_bytes, .timed_search = param.timed_search};
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<LossEngine> created, CreateCudaEngine(options));
  LossEngine& engine = *created;
  const HeadSpec spec = BFloat16Head({"", 0, param.width, param.vocab}, /*trainable=*/true);
  // A plan for a head is made before there is one.
  ASSERT_OK_AND_ASSIGN(const MemoryPlan plan, engine.PlanHead(spec));
  EXPECT_LE(PlannedFor(plan, "workspace"), param.workspace_bytes);

  const int64_t baseline = UsedBytes();
  MemoryWatch creation;
  const std::unique_ptr<EngineHead> head = MakeHeadOn(engine, spec);
  std::unique_ptr<EngineHead> teacher;
  if (param.divergence) teacher = MakeHeadOn(engine, BFloat16Head({"", 0, param.width, param.vocab}, /*trainable=*/false));
  creation.Stop();
  EXPECT_EQ(head->plan().total_bytes, plan.total_bytes);
  const int64_t planned = engine.planned_bytes();
  if (!param.divergence) {
    EXPECT_EQ(planned, plan.total_bytes);
  }
  const auto expect_as_planned = [&](const std::string& what, int64_t used) {
    const double share = static_cast<double>(used) / static_cast<double>(planned);
    RunFigures().Add({name + "_" + what + "_of_plan", share, "x planned bytes", 1.02});
    EXPECT_LE(std::abs(static_cast<double>(used - planned)), 0.02 * static_cast<double>(planned) + kGranularityBytes)
        << what << ": " << used / kMiB << " MiB used, " << planned / kMiB << " MiB planned: " << plan.ToString();
  };
  RunFigures().Add({name + "_planned", static_cast<double>(planned) / kMiB, "MiB", {}});
  expect_as_planned("heads", creation.largest() - baseline);

  const auto compute = [&](int64_t row_count, MemorySpace memory) {
    std::ostringstream words;
    words << "n" << row_count << (memory == MemorySpace::kHost ? "_host" : "");
    const std::string what = words.str();
    SCOPED_TRACE(what);
    const int64_t before_rows = UsedBytes();
    ZeroRows rows(param, row_count, memory);
    const int64_t of_rows = UsedBytes() - before_rows;
    // The first call may load code that no earlier one has run; the second has nothing left to take.
    MemoryWatch first;
    rows.Compute(engine, *head, teacher.get());
    first.Stop();
    MemoryWatch second;
    rows.Compute(engine, *head, teacher.get());
    second.Stop();
    EXPECT_EQ(second.largest(), second.smallest()) << "memory was taken or given back during a computation";
    const int64_t used = first.largest() - baseline - of_rows;
    expect_as_planned(what, used);
    // Beyond weights, accumulators and the micro-batch's own tensors.
    const int64_t of_heads = planned - PlannedFor(plan, "workspace");
    EXPECT_LE(used - of_heads, param.workspace_bytes + kGranularityBytes + planned / 50);
  };
  for (const int64_t row_count : {1, 128, 4096, 131072}) {
    if (param.timed_search && row_count > 4096) continue;
    compute(row_count, MemorySpace::kDevice);
  }
  compute(4096, MemorySpace::kHost);
}

INSTANTIATE_TEST_SUITE_P(All, DeviceMemory, ::testing::ValuesIn(MemoryCases()), [](const auto& test) { return test.param.Name(); });

// Heads that go give everything back; those that come again take no more than before.
TEST(DeviceMemoryOfHeads, IsGivenBack) {
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<LossEngine> engine,
                       CreateCudaEngine(EngineOptions{.workspace_bytes = kGiB, .timed_search = false}));
  HeadSpec spec = BFloat16Head({"", 0, 2048, 50257}, /*trainable=*/true);
  spec.optimizer = AdamWSpec{};
  spec.staging_slots = 2;
  spec.has_bias = true;
  MakeHeadOn(*engine, spec).reset();
  const int64_t baseline = UsedBytes();
  int64_t with_head = 0;
  for (int round = 0; round < 3; ++round) {
    const std::unique_ptr<EngineHead> head = MakeHeadOn(*engine, spec);
    const int64_t used = UsedBytes() - baseline;
    if (round == 0) with_head = used;
    EXPECT_EQ(used, with_head) << "round " << round;
  }
  EXPECT_EQ(UsedBytes(), baseline);
  EXPECT_EQ(engine->planned_bytes(), 0);
  // The workspace may stay with the engine.
  const int64_t planned = engine->PlanHead(spec)->total_bytes;
  EXPECT_LE(with_head, planned + planned / 50 + kGranularityBytes);
}

// A head whose workspace has no room beside others is refused, and the existing heads continue as before.
TEST(DeviceMemoryOfHeads, HeadThatDoesNotFitTakesNothingFromOthers) {
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<LossEngine> engine, CreateCudaEngine(EngineOptions{.timed_search = false}));
  const HeadSpec small = BFloat16Head({"", 0, 64, 1000}, /*trainable=*/true);
  const std::unique_ptr<EngineHead> head = MakeHeadOn(*engine, small);
  const std::vector<uint16_t> weight(static_cast<size_t>(small.vocab_size * small.hidden_size), 0x3f80);  // 1
  ASSERT_TRUE(head->WriteTensor(HeadTensor::kWeight, 0, static_cast<int64_t>(weight.size()), weight.data()).ok());
  const int64_t planned = engine->planned_bytes();

  size_t free_bytes = 0;
  size_t total_bytes = 0;
  CheckCuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  const HeadSpec large = BFloat16Head({"", 0, 64, 128256}, /*trainable=*/true);
  ASSERT_GT(engine->PlanHead(large)->total_bytes, 2 * kGiB);
  const Buffer others(BufferKind::kDevice, static_cast<int64_t>(free_bytes) - kGiB);
  const absl::StatusOr<std::unique_ptr<EngineHead>> refused = engine->CreateHead(large);
  EXPECT_REASON(refused, kMemoryBudgetExceeded);
  EXPECT_EQ(engine->planned_bytes(), planned);

  std::vector<uint16_t> read(weight.size());
  ASSERT_TRUE(head->ReadTensor(HeadTensor::kWeight, 0, static_cast<int64_t>(read.size()), read.data()).ok());
  EXPECT_EQ(read, weight);
  const Buffer hidden(BufferKind::kPinned, 8 * small.hidden_size * 2);
  std::memset(hidden.as<void>(), 0, static_cast<size_t>(hidden.bytes()));
  const std::vector<int32_t> targets(8, 3);
  LossTerm term = {.head = head.get(), .row_count = 8, .targets = targets};
  const MicroBatch micro_batch = {.hidden = {hidden.as<void>(), 8, small.hidden_size, DataType::kBFloat16, MemorySpace::kHost},
                                  .terms = absl::MakeConstSpan(&term, 1)};
  ASSERT_OK_AND_ASSIGN(const MicroBatchResult computed, engine->Compute(micro_batch));
  EXPECT_NEAR(computed.terms[0].loss_sum, 8 * std::log(1000.0), 1e-3);
}

}  // namespace
}  // namespace headwater::testing
