#include "tests/kernels/cuda/cuda_problem.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "tests/kernels/cuda/cuda_fp64.h"

namespace headwater::testing {
namespace {

constexpr int64_t kBFloat16 = 2;

Buffer NormalValues(int64_t rows, int64_t columns, uint64_t seed, double deviation) {
  Buffer values(BufferKind::kDevice, rows * columns * kBFloat16);
  CheckCuda(FillNormal(values.as<uint16_t>(), rows * columns, seed, deviation), "FillNormal");
  return values;
}

// Rows whose products with rows of standard deviation 1 have the deviation given.
Buffer WeightValues(const ProblemShape& shape, uint64_t seed, double logit_deviation) {
  return NormalValues(shape.vocab, shape.width, seed, logit_deviation / std::sqrt(static_cast<double>(shape.width)));
}

template <typename T>
Buffer ToDevice(const std::vector<T>& values) {
  Buffer buffer(BufferKind::kDevice, static_cast<int64_t>(values.size() * sizeof(T)));
  CopyMemory(buffer.as<void>(), values.data(), buffer.bytes());
  return buffer;
}

// Spread over the vocabulary, each in a part of its own, so that all differ.
std::vector<int32_t> DrawTargets(const ProblemShape& shape) {
  std::mt19937_64 random(7);
  const int64_t part = shape.vocab / shape.rows;
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < shape.rows; ++i) {
    targets.push_back(static_cast<int32_t>(i * part + std::uniform_int_distribution<int64_t>(0, part - 1)(random)));
  }
  std::shuffle(targets.begin(), targets.end(), random);
  return targets;
}

struct RegimeValues {
  const char* name;
  double deviation = 1;  // of the logits
  bool has_odds = false;
  double low_odds = 0, high_odds = 0;  // of the rows' own columns: ln(p / (1 - p))
};

const RegimeValues& ValuesOf(Regime regime) {
  const auto with_rest = [](const char* name, double rest) {
    const double odds = std::log1p(-rest) - std::log(rest);
    return RegimeValues{name, 1, true, odds, odds};
  };
  // In the order of the regimes.
  static const RegimeValues values[] = {{"flat"},
                                        {"realistic", 1, true, -6, 3},
                                        {"std30", 30},
                                        {"confident", 1, true, 3.9, 9},
                                        with_rest("three_nines", 1e-3),
                                        with_rest("five_nines", 1e-5),
                                        with_rest("nine_nines", 1e-9),
                                        {"nearly_equal"}};
  return values[static_cast<size_t>(regime)];
}

// Gives each row the log-odds of the regime at its target, over other logits of standard deviation 1; nothing if it has none.
void SetOdds(const DeviceProblem& problem, Regime regime, uint64_t seed, const Buffer& hidden, const Buffer& weight) {
  const RegimeValues& of = ValuesOf(regime);
  if (!of.has_odds) return;
  const int64_t rows = problem.shape.rows;
  const double lse_of_others = std::log(static_cast<double>(problem.shape.vocab)) + 0.5;
  std::vector<double> logits;
  for (int64_t i = 0; i < rows; ++i) {
    const double share = (static_cast<double>(i) + 0.5) / static_cast<double>(rows);
    logits.push_back(lse_of_others + (of.low_odds + (of.high_odds - of.low_odds) * share));
  }
  std::mt19937_64 random(seed);
  std::shuffle(logits.begin(), logits.end(), random);
  const Buffer device_logits = ToDevice(logits);
  CheckCuda(SetLogits(hidden.as<uint16_t>(), problem.device_targets.as<int32_t>(), device_logits.as<double>(), rows,
                      problem.shape.width, weight.as<uint16_t>()),
            "SetLogits");
  CheckCuda(cudaDeviceSynchronize(), "SetLogits");
}

// Page-locked memory of at least so many bytes, the same for every call: taking gigabytes of it costs more than a computation.
void* HostScratch(int64_t bytes) {
  static Buffer& buffer = *new Buffer;  // never destroyed: CUDA may be gone by then
  if (buffer.bytes() < bytes) buffer = Buffer(BufferKind::kPinned, bytes);
  return buffer.as<void>();
}

bool SameMemory(const Buffer& a, const Buffer& b) {
  if (a.bytes() != b.bytes()) return false;
  std::vector<uint8_t> left(static_cast<size_t>(a.bytes()));
  std::vector<uint8_t> right(left.size());
  CopyMemory(left.data(), a.as<void>(), a.bytes());
  CopyMemory(right.data(), b.as<void>(), b.bytes());
  return left == right;
}

template <typename T>
bool SameValues(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace

const char* RegimeName(Regime regime) { return ValuesOf(regime).name; }

DeviceProblem MakeCrossEntropyProblem(const ProblemShape& shape, Regime regime) {
  DeviceProblem problem = {.shape = shape,
                           .hidden = NormalValues(shape.rows, shape.width, 1, 1),
                           .weight = WeightValues(shape, 2, ValuesOf(regime).deviation),
                           .targets = DrawTargets(shape)};
  problem.device_targets = ToDevice(problem.targets);
  SetOdds(problem, regime, 3, problem.hidden, problem.weight);
  return problem;
}

DeviceProblem MakeDivergenceProblem(const ProblemShape& shape, Regime regime) {
  DeviceProblem problem = MakeCrossEntropyProblem(shape, regime);
  if (regime == Regime::kNearlyEqual) {
    problem.teacher_hidden = NormalValues(shape.rows, shape.width, 1, 1);  // the student's
    problem.teacher_weight = WeightValues(shape, 4, 3);
    CheckCuda(FillNormal(problem.weight.as<uint16_t>(), shape.vocab * shape.width, 5,
                         0.03 / std::sqrt(static_cast<double>(shape.width)), problem.teacher_weight.as<uint16_t>()),
              "FillNormal");
    return problem;
  }
  problem.teacher_hidden = NormalValues(shape.rows, shape.width, 6, 1);
  problem.teacher_weight = WeightValues(shape, 8, ValuesOf(regime).deviation);
  SetOdds(problem, regime, 9, problem.teacher_hidden, problem.teacher_weight);
  return problem;
}

bool SameBits(const DeviceOutcome& a, const DeviceOutcome& b) {
  return std::memcmp(&a.sums.loss_sum, &b.sums.loss_sum, sizeof(double)) == 0 && SameValues(a.token_loss, b.token_loss) &&
         SameValues(a.lse, b.lse) && SameValues(a.target_log_probability, b.target_log_probability) &&
         SameValues(a.entropy, b.entropy) && SameValues(a.argmax, b.argmax) && SameMemory(a.grad_hidden, b.grad_hidden) &&
         SameMemory(a.grad_weight, b.grad_weight);
}

HeadSpec BFloat16Head(const ProblemShape& shape, bool trainable) {
  return {.vocab_size = shape.vocab,
          .hidden_size = shape.width,
          .data_type = DataType::kBFloat16,
          .transform = {.valid_vocab_size = shape.vocab},
          .trainable = trainable};
}

void WriteWeight(EngineHead& head, const Buffer& weight) {
  void* host = HostScratch(weight.bytes());
  CopyMemory(host, weight.as<void>(), weight.bytes());
  CheckStatus(head.WriteTensor(HeadTensor::kWeight, 0, weight.bytes() / kBFloat16, host), "WriteTensor");
}

DeviceEngine::DeviceEngine(const DeviceProblem& problem, EngineOptions options, int32_t staging_slots)
    : problem_(problem), engine_(MakeCudaEngine(std::move(options))) {
  HeadSpec spec = BFloat16Head(problem.shape, /*trainable=*/true);
  spec.staging_slots = staging_slots;
  head_ = MakeHeadOn(*engine_, spec);
  WriteWeight(*head_, problem.weight);
  if (problem.teacher_weight.bytes() == 0) return;
  teacher_ = MakeHeadOn(*engine_, BFloat16Head(problem.shape, /*trainable=*/false));
  WriteWeight(*teacher_, problem.teacher_weight);
}

MicroBatch DeviceEngine::Make(const void* hidden, MemorySpace hidden_memory, void* grad_hidden, MemorySpace grad_memory,
                              int64_t first_row, int64_t row_count) {
  const absl::Span<const int32_t> targets = problem_.targets;
  term_ = {.head = head_.get(),
           .row_count = row_count,
           .targets = targets.subspan(static_cast<size_t>(first_row), static_cast<size_t>(row_count))};
  return {.hidden = {hidden, row_count, problem_.shape.width, DataType::kBFloat16, hidden_memory},
          .terms = absl::MakeConstSpan(&term_, 1),
          .backward = true,
          .grad_hidden = {grad_hidden, row_count, problem_.shape.width, DataType::kBFloat16, grad_memory},
          .grad_weight = GradWeightMode::kAccumulate};
}

DeviceOutcome DeviceEngine::Compute(const DeviceLoss& loss, MemorySpace memory) {
  const ProblemShape& shape = problem_.shape;
  CheckStatus(head_->ZeroGradient(), "ZeroGradient");
  const BufferKind kind = memory == MemorySpace::kDevice ? BufferKind::kDevice : BufferKind::kPinned;
  Buffer hidden(kind, problem_.hidden.bytes());
  Buffer grad_hidden(kind, problem_.hidden.bytes());
  CopyMemory(hidden.as<void>(), problem_.hidden.as<void>(), hidden.bytes());
  // NaN, which an element that stays unwritten shows.
  const std::vector<uint8_t> poison(static_cast<size_t>(grad_hidden.bytes()), 0xff);
  CopyMemory(grad_hidden.as<void>(), poison.data(), grad_hidden.bytes());
  const MicroBatch micro_batch = Make(hidden.as<void>(), memory, grad_hidden.as<void>(), memory, 0, shape.rows);
  DeviceOutcome outcome = Run(loss, micro_batch, /*all_outputs=*/false);
  outcome.grad_hidden = Buffer(BufferKind::kDevice, grad_hidden.bytes());
  CopyMemory(outcome.grad_hidden.as<void>(), grad_hidden.as<void>(), grad_hidden.bytes());
  const int64_t elements = shape.vocab * shape.width;
  outcome.grad_weight = Buffer(BufferKind::kDevice, elements * static_cast<int64_t>(sizeof(float)));
  void* host = HostScratch(outcome.grad_weight.bytes());
  CheckStatus(head_->ReadTensor(HeadTensor::kGradWeight, 0, elements, host), "ReadTensor");
  CopyMemory(outcome.grad_weight.as<void>(), host, outcome.grad_weight.bytes());
  return outcome;
}

DeviceOutcome DeviceEngine::ComputeTokenOutputs(const DeviceLoss& loss) {
  MicroBatch micro_batch =
      Make(problem_.hidden.as<void>(), MemorySpace::kDevice, nullptr, MemorySpace::kDevice, 0, problem_.shape.rows);
  micro_batch.backward = false;
  micro_batch.grad_hidden = {};
  micro_batch.grad_weight = GradWeightMode::kNone;
  return Run(loss, micro_batch, /*all_outputs=*/true);
}

DeviceOutcome DeviceEngine::Run(const DeviceLoss& loss, const MicroBatch& micro_batch, bool all_outputs) {
  const ProblemShape& shape = problem_.shape;
  const size_t rows = static_cast<size_t>(shape.rows);
  DeviceOutcome outcome;
  term_.loss_scale = loss.loss_scale;
  outcome.token_loss.resize(rows);
  term_.token_loss = outcome.token_loss.data();
  if (loss.divergence) {
    const JsdSpec spec = {.beta = loss.beta};
    term_.loss = spec;
    term_.teacher_head = teacher_.get();
    term_.teacher_hidden = {problem_.teacher_hidden.as<void>(), shape.rows, shape.width, DataType::kBFloat16, MemorySpace::kDevice};
  }
  if (!loss.divergence || all_outputs) {
    outcome.lse.resize(rows);
    outcome.target_log_probability.resize(rows);
    term_.lse = outcome.lse.data();
    term_.target_log_probability = outcome.target_log_probability.data();
  }
  if (all_outputs) {
    outcome.entropy.resize(rows);
    outcome.argmax.resize(rows);
    term_.entropy = outcome.entropy.data();
    term_.argmax = outcome.argmax.data();
  }
  absl::StatusOr<MicroBatchResult> result = engine_->Compute(micro_batch);
  CheckStatus(result.status(), "Compute");
  outcome.sums = result->terms[0];
  return outcome;
}

}  // namespace headwater::testing
