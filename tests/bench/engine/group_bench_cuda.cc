// Several GPUs against one of them, in one process and run, by the protocol of alternating_blocks.h. It times a micro-batch on a
// single engine, and on a group that holds the same head in shards. bf16, grad_weight added in fp32. Each rank is driven by a
// thread of its own. In cases rows_* each rank has all of the head (Parallelism::kRows) and computes micro-batches of its own, back
// to back. Such a case times a whole step: so many micro-batches over all ranks, the gradient's sum, its norm, AdamW.
//
// Cards of one host differ by several per cent under the same power limit, and a group goes by its slowest. So all of them compute
// alone at the same time, which also keeps them as warm as the group does. One GPU's time is the mean of theirs.
//
//   group_bench_cuda [--gpus=2] [--cases=NAME,...] [--memory=device|pinned] [--seconds=1] [--warmup=2] [--rounds=2] [--idle=0]
//                    [--workspace-mib=4096] [--algorithms=FILE] [--output=FILE.csv] [--commit=NAME] [--list]
//
// Rows and grad_hidden are in device memory, the rows on every rank's own, or in page-locked host memory. Writes a table to
// standard output, and the figures into the file (figure_file.h). Ends with 1 if a figure misses what is required.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "headwater/kernels/engine.h"
#include "tests/bench/common/alternating_blocks.h"
#include "tests/bench/common/flags.h"
#include "tests/kernels/cuda/cuda_fp64.h"
#include "tests/kernels/cuda/cuda_group.h"
#include "tests/kernels/cuda/cuda_problem.h"
#include "tests/kernels/support/figure_file.h"

namespace headwater::bench {
namespace {

using testing::Buffer;
using testing::BufferKind;
using testing::CheckCuda;
using testing::CheckStatus;

constexpr int64_t kVocab = 128256;
constexpr int64_t kWidth = 4096;
constexpr double kLearningRate = 1e-6;  // the loss of rows that are seen thousands of times stays what it is

struct BenchCase {
  const char* name;
  int64_t rows;
  bool divergence;
  int64_t step_micro_batches;  // of a step that the ranks share; 0: all ranks compute each micro-batch, and there are no steps
  // So many times as fast as one GPU, on 2, 4 and 8, with rows in device memory; 0: nothing is required.
  double at_least[3];
};
constexpr BenchCase kCases[] = {
    {"ce_n8192_h4096_v128256", 8192, false, 0, {1.85, 3.6, 6.7}},
    {"ce_n32768_h4096_v128256", 32768, false, 0, {0, 0, 7.2}},
    {"jsd_n8192_hs4096_ht4096_v128256", 8192, true, 0, {0, 0, 6.5}},
    {"rows_ce_n8192_h4096_v128256", 8192, false, 64, {0, 0, 7.2}},
};

struct Settings {
  int32_t gpus = 2;
  std::vector<std::string> cases;  // empty: all
  bool pinned = false;
  BlockOptions blocks;
  int64_t workspace_mib = 4096;
  std::string algorithms, output, commit = "unknown";
};

Settings ParseFlags(int argc, char** argv) {
  Settings settings;
  settings.blocks.idle_seconds = 0;
  std::vector<std::string> names;
  for (const BenchCase& bench_case : kCases) names.push_back(bench_case.name);
  bool list = false;
  std::string memory = "device";
  Flags flags;
  flags.Number("--gpus", 2, 8, &settings.gpus);
  flags.Names("--cases", names, &settings.cases);
  flags.Choice("--memory", {"device", "pinned"}, &memory);
  flags.Blocks(&settings.blocks);
  flags.Number("--workspace-mib", 1, 1 << 20, &settings.workspace_mib);
  flags.Text("--algorithms", &settings.algorithms);
  flags.Text("--output", &settings.output);
  flags.Text("--commit", &settings.commit);
  flags.Switch("--list", &list);
  flags.Parse(argc, argv);
  settings.pinned = memory == "pinned";
  if (list) {
    for (const std::string& name : names) std::printf("%s\n", name.c_str());
    std::exit(0);
  }
  return settings;
}

// bf16 of the normal distribution, on the current GPU.
Buffer Normal(int64_t count, uint64_t seed, double deviation) {
  Buffer values(BufferKind::kDevice, count * 2);
  CheckCuda(testing::FillNormal(values.as<uint16_t>(), count, seed, deviation), "FillNormal");
  CheckCuda(cudaDeviceSynchronize(), "FillNormal");
  return values;
}

// One engine's heads and rows.
class Side {
 public:
  Side(LossEngine& engine, const BenchCase& bench_case, bool pinned) : case_(bench_case), engine_(engine) {
    const double deviation = 1 / std::sqrt(static_cast<double>(kWidth));
    student_ = MakeHead(/*trainable=*/true, 11, deviation);
    if (case_.divergence) teacher_ = MakeHead(/*trainable=*/false, 12, deviation);
    memory_ = pinned ? MemorySpace::kHost : MemorySpace::kDevice;
    hidden_ = Rows(21, pinned);
    if (case_.divergence) teacher_hidden_ = Rows(22, pinned);
    grad_hidden_ = Buffer(pinned ? BufferKind::kPinned : BufferKind::kDevice, hidden_.bytes());
    std::mt19937_64 random(31);
    for (int64_t i = 0; i < case_.rows; ++i) {
      targets_.push_back(static_cast<int32_t>(std::uniform_int_distribution<int64_t>(0, kVocab - 1)(random)));
    }
    CheckStatus(student_->ZeroGradient(), "ZeroGradient");
  }

  // Returns the loss.
  double Compute() {
    LossTerm term;
    term.head = student_.get();
    term.row_count = case_.rows;
    term.targets = targets_;
    term.loss_scale = 0.37 / static_cast<double>(case_.rows);
    if (case_.divergence) {
      term.loss = JsdSpec();
      term.teacher_head = teacher_.get();
      term.teacher_hidden = {teacher_hidden_.as<void>(), case_.rows, kWidth, DataType::kBFloat16, memory_};
    }
    MicroBatch micro_batch = {.hidden = {hidden_.as<void>(), case_.rows, kWidth, DataType::kBFloat16, memory_},
                              .terms = absl::MakeConstSpan(&term, 1),
                              .backward = true,
                              .grad_hidden = {grad_hidden_.as<void>(), case_.rows, kWidth, DataType::kBFloat16, memory_},
                              .grad_weight = GradWeightMode::kAccumulate};
    const absl::StatusOr<MicroBatchResult> result = engine_.Compute(micro_batch);
    CheckStatus(result.status(), "Compute");
    const LossSums& sums = result->terms[0];
    const double mean = sums.loss_sum / static_cast<double>(sums.valid_token_count);
    if (!(mean > 0.01 && mean < 20) || sums.non_finite_row_count != 0) throw std::runtime_error("the engine computed nonsense");
    return sums.loss_sum;
  }

  // The same, and nothing of it is left.
  double Loss() {
    const double loss = Compute();
    CheckStatus(student_->ZeroGradient(), "ZeroGradient");
    return loss;
  }

  // The share of `rank` among `ranks` in the case's work: a micro-batch, or a step.
  void Work(int32_t rank, int32_t ranks) {
    if (case_.step_micro_batches == 0) {
      Compute();
      return;
    }
    const int64_t count = case_.step_micro_batches;
    for (int64_t i = count * rank / ranks; i < count * (rank + 1) / ranks; ++i) Compute();
    CheckStatus(student_->ReduceGradient(), "ReduceGradient");
    CheckStatus(student_->ComputeGradientStats().status(), "ComputeGradientStats");
    OptimizerStep step = {.learning_rate = kLearningRate, .settings = AdamWSpec(), .update_count = ++update_count_};
    CheckStatus(student_->ApplyOptimizer(step), "ApplyOptimizer");
  }

 private:
  std::unique_ptr<EngineHead> MakeHead(bool trainable, uint64_t seed, double deviation) {
    HeadSpec spec = testing::BFloat16Head({"", 0, kWidth, kVocab}, trainable);
    if (case_.step_micro_batches > 0) {
      spec.parallelism = Parallelism::kRows;
      if (trainable) spec.optimizer = AdamWSpec();
    }
    std::unique_ptr<EngineHead> head = testing::MakeHeadOn(engine_, spec);
    const Buffer weight = Normal(kVocab * kWidth, seed, deviation);
    std::vector<uint16_t> host(static_cast<size_t>(kVocab * kWidth));
    testing::CopyMemory(host.data(), weight.as<void>(), weight.bytes());
    CheckStatus(head->WriteTensor(HeadTensor::kWeight, 0, kVocab * kWidth, host.data()), "WriteTensor");
    return head;
  }

  Buffer Rows(uint64_t seed, bool pinned) const {
    Buffer rows = Normal(case_.rows * kWidth, seed, 1);
    if (!pinned) return rows;
    Buffer host(BufferKind::kPinned, rows.bytes());
    testing::CopyMemory(host.as<void>(), rows.as<void>(), rows.bytes());
    return host;
  }

  const BenchCase& case_;
  LossEngine& engine_;
  std::unique_ptr<EngineHead> student_, teacher_;
  MemorySpace memory_ = MemorySpace::kDevice;
  Buffer hidden_, teacher_hidden_, grad_hidden_;
  std::vector<int32_t> targets_;
  int64_t update_count_ = 0;
};

void ExpectSameLoss(double loss, double expected) {
  if (std::abs(loss - expected) <= 1e-5 * std::abs(expected)) return;
  throw std::runtime_error("the group's loss is " + std::to_string(loss) + ", one GPU's " + std::to_string(expected));
}

// Milliseconds.
struct GroupTimes {
  double group = 0, one = 0;  // medians over blocks; one GPU: the mean of all
  double fastest_one = 0, slowest_one = 0;
  double ratio = 0, ratio_spread = 0;  // the group's time / one GPU's
};

GroupTimes Measure(const BenchCase& bench_case, const Settings& settings, const std::vector<std::unique_ptr<LossEngine>>& alone,
                   testing::CudaGroup& group, CardMonitor& monitor) {
  std::vector<std::unique_ptr<Side>> ones(alone.size()), ranks(alone.size());
  std::vector<double> one_ms(alone.size());  // of each GPU, in the last block
  group.Run([&](int32_t rank) {
    const auto index = static_cast<size_t>(rank);
    ones[index] = std::make_unique<Side>(*alone[index], bench_case, settings.pinned);
    ranks[index] = std::make_unique<Side>(group.engine(rank), bench_case, settings.pinned);
  });
  const Repeat floor = [&](int count) {
    group.Run([&](int32_t rank) {
      const auto index = static_cast<size_t>(rank);
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < count; ++i) ones[index]->Work(0, 1);
      CheckCuda(cudaDeviceSynchronize(), "the engine's last products");
      one_ms[index] = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / count;
    });
  };
  const Repeat candidate = [&](int count) {
    group.Run([&](int32_t rank) {
      for (int i = 0; i < count; ++i) ranks[static_cast<size_t>(rank)]->Work(rank, settings.gpus);
      CheckCuda(cudaDeviceSynchronize(), "a rank's last products");
    });
  };
  const bool has_steps = bench_case.step_micro_batches > 0;
  // With the weights as they are, and as a step leaves them.
  for (int steps = 0; steps <= (has_steps ? 1 : 0); ++steps) {
    floor(steps);
    candidate(steps);
    double expected = 0;
    group.Run([&](int32_t rank) {
      const double loss = ones[static_cast<size_t>(rank)]->Loss();
      if (rank == 0) expected = loss;
    });
    std::vector<double> losses(ranks.size());
    group.Run([&](int32_t rank) { losses[static_cast<size_t>(rank)] = ranks[static_cast<size_t>(rank)]->Loss(); });
    for (const double loss : losses) {
      ExpectSameLoss(loss, expected);
      if (!has_steps) break;  // only the first rank has it
    }
  }
  // The floor's blocks end with the slowest GPU.
  const BlockTimes blocks = TimeAlternately(floor, candidate, settings.blocks, monitor);
  group.Run([&](int32_t rank) {
    ones[static_cast<size_t>(rank)].reset();
    ranks[static_cast<size_t>(rank)].reset();
  });
  const auto [fastest, slowest] = std::minmax_element(one_ms.begin(), one_ms.end());
  const double mean_of_slowest = std::accumulate(one_ms.begin(), one_ms.end(), 0.0) / static_cast<double>(one_ms.size()) / *slowest;
  GroupTimes times;
  times.group = blocks.candidate_ms;
  times.one = blocks.floor_ms * mean_of_slowest;
  times.fastest_one = blocks.floor_ms * *fastest / *slowest;
  times.slowest_one = blocks.floor_ms;
  times.ratio = blocks.ratio / mean_of_slowest;
  times.ratio_spread = blocks.ratio_spread;
  return times;
}

int RunAll(const Settings& settings) {
  const std::string machine = testing::GpuName();
  testing::FigureFile figures(settings.output, machine + " x " + std::to_string(settings.gpus), settings.commit);
  EngineOptions options;
  options.workspace_bytes = settings.workspace_mib << 20;
  options.algorithm_cache_path = settings.algorithms;
  // Both sides have a head on every GPU.
  std::vector<std::unique_ptr<LossEngine>> alone;
  for (options.device_index = 0; options.device_index < settings.gpus; ++options.device_index) {
    absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(options);
    CheckStatus(engine.status(), "CreateCudaEngine");
    alone.push_back(*std::move(engine));
  }
  testing::CudaGroup group(settings.gpus, options, std::chrono::seconds(300));
  CardMonitor monitor(testing::GpuBusId());
  std::printf("%d x %s; rows in %s memory; %g s warm-up, blocks of %g s, %d rounds\n", settings.gpus, machine.c_str(),
              settings.pinned ? "page-locked" : "device", settings.blocks.warmup_seconds, settings.blocks.block_seconds,
              settings.blocks.rounds);
  std::printf("%-34s %9s %9s %19s %8s %7s %8s\n", "case", "group ms", "one ms", "fastest to slowest", "speed-up", "spread",
              "required");
  int missed = 0;
  for (const BenchCase& bench_case : kCases) {
    const bool chosen =
        settings.cases.empty() || std::find(settings.cases.begin(), settings.cases.end(), bench_case.name) != settings.cases.end();
    if (!chosen) continue;
    const GroupTimes times = Measure(bench_case, settings, alone, group, monitor);
    const double speed_up = 1 / times.ratio;
    const double required = settings.pinned      ? 0
                            : settings.gpus == 2 ? bench_case.at_least[0]
                            : settings.gpus == 4 ? bench_case.at_least[1]
                            : settings.gpus == 8 ? bench_case.at_least[2]
                                                 : 0;
    const bool misses = !(speed_up >= required);
    missed += misses ? 1 : 0;
    const std::string name = "cuda_group" + std::to_string(settings.gpus) + (settings.pinned ? "_pinned_" : "_") + bench_case.name;
    figures.Add({name + "_ratio", times.ratio, "x one GPU", required > 0 ? std::optional<double>(1 / required) : std::nullopt});
    figures.Add({name + "_speed_up", speed_up, "x one GPU", {}});
    figures.Add({name + "_spread", times.ratio_spread, "(max-min)/median", {}});
    figures.Add({name + "_ms", times.group, "ms", {}});
    figures.Add({name + "_one_ms", times.one, "ms", {}});
    figures.Add({name + "_fastest_one_ms", times.fastest_one, "ms", {}});
    figures.Add({name + "_slowest_one_ms", times.slowest_one, "ms", {}});
    const double rows = static_cast<double>(bench_case.rows * std::max<int64_t>(bench_case.step_micro_batches, 1));
    figures.Add({name + "_rows_per_s", rows / times.group * 1000, "rows/s", {}});
    figures.Add({name + "_one_rows_per_s", rows / times.one * 1000, "rows/s", {}});
    std::printf("%-34s %9.3f %9.3f %9.3f %9.3f %8.3f %7.4f %8.2f%s\n", bench_case.name, times.group, times.one, times.fastest_one,
                times.slowest_one, speed_up, times.ratio_spread, required, misses ? "  below what is required" : "");
    std::fflush(stdout);
    const std::string error = figures.Write();
    if (!error.empty()) throw std::runtime_error(error);
  }
  return missed > 0 ? 1 : 0;
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) {
  const headwater::bench::Settings settings = headwater::bench::ParseFlags(argc, argv);
  const std::string reason = headwater::testing::ReasonForNoGroup(settings.gpus);
  return headwater::bench::RunUnless(reason, [&] { return headwater::bench::RunAll(settings); });
}
