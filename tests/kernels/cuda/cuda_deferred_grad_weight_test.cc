// Deferred grad_weight products of micro-batches in device memory. They have the bits of one call with all rows, whatever ends the
// wait, and nothing of a call that was ended. On a Hopper GPU, whose product of exponentials computes a row alike in any call.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/cuda/cuda_problem.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/cuda/cuda_test_environment.h"

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

constexpr int64_t kRows = 4096;  // of one call: more than a micro-batch has whose product waits
constexpr int64_t kMostWaiting = 8192;
const ProblemShape kShape = {"", kRows, 512, 6000};

const DeviceProblem& Problem() {
  static const DeviceProblem problem = MakeCrossEntropyProblem(kShape, Regime::kFlat);
  return problem;
}

// Rows [first, first + count).
using RowRanges = std::vector<std::pair<int64_t, int64_t>>;

// An engine with the problem's head, whose rows and grad_hidden are in device memory.
class Trainee {
 public:
  explicit Trainee(const EngineOptions& options = {})
      : engine_(MakeCudaEngine(options)), grad_hidden_(BufferKind::kDevice, Problem().hidden.bytes()), head_(NewHead(kShape)) {
    WriteWeight(*head_, Problem().weight);
  }

  LossEngine& engine() { return *engine_; }
  EngineHead& head() { return *head_; }
  std::unique_ptr<EngineHead> NewHead(const ProblemShape& shape) { return MakeHeadOn(*engine_, BFloat16Head(shape, true)); }

  absl::Status TryCompute(EngineHead& head, int64_t first, int64_t count, RowFlow* flow = nullptr) {
    const int64_t row_bytes = kShape.width * 2;
    LossTerm term = {
        .head = &head,
        .row_count = count,
        .targets = absl::MakeConstSpan(Problem().targets).subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
        .loss_scale = 1.0 / 64};
    const MicroBatch micro_batch = {.hidden = {Problem().hidden.as<uint8_t>() + first * row_bytes, count, kShape.width,
                                               DataType::kBFloat16, MemorySpace::kDevice},
                                    .terms = absl::MakeConstSpan(&term, 1),
                                    .backward = true,
                                    .grad_hidden = {grad_hidden_.as<uint8_t>() + first * row_bytes, count, kShape.width,
                                                    DataType::kBFloat16, MemorySpace::kDevice},
                                    .grad_weight = GradWeightMode::kAccumulate,
                                    .flow = flow};
    return engine_->Compute(micro_batch).status();
  }
  void Compute(int64_t first, int64_t count) { CheckStatus(TryCompute(*head_, first, count), "Compute"); }

  std::vector<float> Gradient() { return ReadFloats(*head_, HeadTensor::kGradWeight); }

 private:
  std::unique_ptr<LossEngine> engine_;
  Buffer grad_hidden_;
  std::unique_ptr<EngineHead> head_;
};

std::vector<float> GradientOf(const RowRanges& calls, bool zeroed_first = false, const EngineOptions& options = {}) {
  Trainee trainee(options);
  if (zeroed_first) {
    // The accumulator's former content does not count any more, though it may still lie there.
    const std::vector<float> other(static_cast<size_t>(kShape.vocab * kShape.width), 3.0f);
    CheckStatus(trainee.head().WriteTensor(HeadTensor::kGradWeight, 0, static_cast<int64_t>(other.size()), other.data()),
                "WriteTensor");
    CheckStatus(trainee.head().ZeroGradient(), "ZeroGradient");
  }
  for (const auto& [first, count] : calls) trainee.Compute(first, count);
  return trainee.Gradient();
}

// All rows in one call, whose product does not wait.
const std::vector<float>& GradientOfOneCall() {
  static const std::vector<float> gradient = GradientOf({{0, kRows}});
  return gradient;
}

TEST(DeferredGradWeight, HasTheBitsOfOneCallWithAllRows) {
  const std::vector<RowRanges> splits = {
      {{0, 1024}, {1024, 1024}, {2048, 1024}, {3072, 1024}},
      {{0, 2048}, {2048, 2048}},
      {{0, 300}, {300, 1024}, {1324, 2047}, {3371, 725}},
  };
  for (const bool zeroed_first : {false, true}) {
    EXPECT_TRUE(GradientOf({{0, kRows}}, zeroed_first) == GradientOfOneCall()) << "one call, zeroed first: " << zeroed_first;
    for (const RowRanges& calls : splits) {
      EXPECT_TRUE(GradientOf(calls, zeroed_first) == GradientOfOneCall())
          << calls.size() << " calls, zeroed first: " << zeroed_first;
    }
  }
}

// A workspace in which fewer rows wait, or none.
TEST(DeferredGradWeight, NeedsNoLargeWorkspace) {
  for (const int64_t mebibytes : {80, 96, 128, 192}) {
    const EngineOptions options = {.workspace_bytes = mebibytes << 20};
    // Each of more rows than take another form, whose gradient is rounded elsewhere.
    const RowRanges calls = {{0, 1024}, {1024, 300}, {1324, 300}, {1624, 424}, {2048, 2048}};
    EXPECT_LE(RelativeDifference(GradientOf(calls, false, options), GradientOfOneCall()), 1e-5) << mebibytes << " MiB";
  }
}

TEST(DeferredGradWeight, IsFlushedWhenTheNextRowsHaveNoRoom) {
  const std::vector<float> once = GradientOf({{0, 1024}});
  for (const int64_t calls : {kMostWaiting / 1024, kMostWaiting / 1024 + 1, 2 * kMostWaiting / 1024 + 3}) {
    const RowRanges repeated(static_cast<size_t>(calls), {0, 1024});
    EXPECT_LE(RelativeDifference(GradientOf(repeated), once, static_cast<double>(calls)), 1e-5) << calls << " calls";
  }
}

// Rows wait before and after each of them.
TEST(DeferredGradWeight, IsFlushedByCallsThatNeedItsPlace) {
  struct Event {
    std::string name;
    std::function<void(Trainee&)> happen;
  };
  const std::vector<Event> events = {
      {"rows of another head wait",
       [](Trainee& trainee) {
         const auto other = trainee.NewHead(kShape);
         CheckStatus(trainee.TryCompute(*other, 0, 1024), "Compute");
       }},
      {"a larger head comes",
       [](Trainee& trainee) {
         trainee.NewHead({"", kRows, 2 * kShape.width, 2 * kShape.vocab});
       }},
      {"all rows at once for another head",
       [](Trainee& trainee) {
         const auto other = trainee.NewHead(kShape);
         CheckStatus(trainee.TryCompute(*other, 0, kRows), "Compute");
       }},
      {"statistics", [](Trainee& trainee) { CheckStatus(trainee.head().ComputeGradientStats().status(), "statistics"); }},
  };
  for (const Event& event : events) {
    Trainee trainee;
    trainee.Compute(0, 1024);
    event.happen(trainee);
    trainee.Compute(1024, 1024);
    trainee.Compute(2048, 2048);
    EXPECT_LE(RelativeDifference(trainee.Gradient(), GradientOfOneCall()), 1e-5) << event.name;
  }
  // A call of the same head whose product does not wait comes after the rows that do.
  EXPECT_LE(RelativeDifference(GradientOf({{0, 1024}, {0, kRows}, {1024, 2048}, {3072, 1024}}), GradientOfOneCall(), 2), 1e-5);
}

// Ends a computation before its rows are there, or when all of them are.
class EndingFlow final : public RowFlow {
 public:
  explicit EndingFlow(bool at_await) : at_await_(at_await) {}
  absl::Status AwaitRows(int64_t) override { return at_await_ ? End() : absl::OkStatus(); }
  absl::Status Decide(const DigestBuilder*) override { return End(); }
  void GradHiddenReady(int64_t) override {}

 private:
  static absl::Status End() { return MakeError(ErrorReason::kCancelled, "no more is wanted"); }
  const bool at_await_;
};

TEST(DeferredGradWeight, DropsEndedCalls) {
  for (const bool at_await : {false, true}) {
    Trainee trainee;
    EndingFlow flow(at_await);
    for (const bool is_first : {true, false}) {
      if (!is_first) trainee.Compute(0, 1024);
      EXPECT_FALSE(trainee.TryCompute(trainee.head(), 2048, 1024, &flow).ok());
    }
    trainee.Compute(1024, 1024);
    trainee.Compute(2048, 2048);
    EXPECT_TRUE(trainee.Gradient() == GradientOfOneCall());
  }
}

}  // namespace
}  // namespace headwater::testing
