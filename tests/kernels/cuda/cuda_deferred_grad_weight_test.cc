// Deferred grad_weight products of micro-batches in device memory. They have the bits of one call with all rows, whatever ends the
// wait, and nothing of a call that was ended. On a Hopper GPU, whose product of exponentials computes a row alike in any call.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/cuda_problem.h"
#include "tests/kernels/cuda/cuda_test_environment.h"
#include "tests/kernels/support/checked_flow.h"

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

constexpr int64_t kRows = 4096;  // of one call: more than a micro-batch has whose product waits
const ProblemShape kShape = {"", kRows, 512, 6000};

const DeviceProblem& Problem() {
  static const DeviceProblem problem = MakeCrossEntropyProblem(kShape, Regime::kFlat);
  return problem;
}

// Rows [first, first + count).
using RowRanges = std::vector<std::pair<int64_t, int64_t>>;

// Computes rows and their grad_hidden in device memory.
class Trainee : public DeviceEngine {
 public:
  explicit Trainee(const EngineOptions& options = {})
      : DeviceEngine(Problem(), options), grad_hidden_(BufferKind::kDevice, Problem().hidden.bytes()) {}

  std::unique_ptr<EngineHead> NewHead(const ProblemShape& shape) { return MakeHeadOn(engine(), BFloat16Head(shape, true)); }

  MicroBatch MakeRows(int64_t first, int64_t count) {
    const int64_t start = first * kShape.width * 2;
    const MicroBatch micro_batch = Make(Problem().hidden.as<char>() + start, MemorySpace::kDevice, grad_hidden_.as<char>() + start,
                                        MemorySpace::kDevice, first, count);
    term().loss_scale = 1.0 / 64;
    return micro_batch;
  }
  void ComputeFor(EngineHead& head, int64_t first, int64_t count) {
    const MicroBatch micro_batch = MakeRows(first, count);
    term().head = &head;
    CheckStatus(engine().Compute(micro_batch).status(), "Compute");
  }
  void Compute(int64_t first, int64_t count) { ComputeFor(head(), first, count); }

 private:
  const Buffer grad_hidden_;
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
  return trainee.ReadGradient();
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
         trainee.ComputeFor(*other, 0, 1024);
       }},
      {"a larger head comes",
       [](Trainee& trainee) {
         trainee.NewHead({"", kRows, 2 * kShape.width, 2 * kShape.vocab});
       }},
      {"all rows at once for another head",
       [](Trainee& trainee) {
         const auto other = trainee.NewHead(kShape);
         trainee.ComputeFor(*other, 0, kRows);
       }},
      {"statistics", [](Trainee& trainee) { CheckStatus(trainee.head().ComputeGradientStats().status(), "statistics"); }},
  };
  for (const Event& event : events) {
    Trainee trainee;
    trainee.Compute(0, 1024);
    event.happen(trainee);
    trainee.Compute(1024, 1024);
    trainee.Compute(2048, 2048);
    EXPECT_LE(RelativeDifference(trainee.ReadGradient(), GradientOfOneCall()), 1e-5) << event.name;
  }
  // A call of the same head whose product does not wait comes after the rows that do.
  EXPECT_LE(RelativeDifference(GradientOf({{0, 1024}, {0, kRows}, {1024, 2048}, {3072, 1024}}), GradientOfOneCall(), 2), 1e-5);
}

TEST(DeferredGradWeight, DropsEndedCalls) {
  for (const bool at_await : {false, true}) {
    Trainee trainee;
    for (const bool is_first : {true, false}) {
      if (!is_first) trainee.Compute(0, 1024);
      MicroBatch micro_batch = trainee.MakeRows(2048, 1024);
      CheckedFlow flow(micro_batch);
      flow.FailAtAwait(at_await ? 1 : 0);
      if (!at_await) flow.FailAtDecide();
      micro_batch.flow = &flow;
      EXPECT_FALSE(trainee.engine().Compute(micro_batch).ok());
    }
    trainee.Compute(1024, 1024);
    trainee.Compute(2048, 2048);
    EXPECT_TRUE(trainee.ReadGradient() == GradientOfOneCall());
  }
}

}  // namespace
}  // namespace headwater::testing
