// The CUDA engine's time against the bare matrix products (cuda_floor.h), in one process and run, by the protocol of
// alternating_blocks.h. Types are bf16, rows and grad_hidden are in device memory, and grad_weight is added in fp32.
//
//   engine_bench_cuda [--cases=NAME,...] [--seconds=1] [--warmup=2] [--rounds=2] [--idle=2] [--workspace-mib=4096]
//                     [--algorithms=FILE] [--output=FILE.csv] [--commit=NAME] [--list]
//
// Writes a table to standard output, and the figures into the file (figure_file.h). Ends with 1 if a figure misses what is
// required.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/engine.h"
#include "tests/bench/common/alternating_blocks.h"
#include "tests/bench/common/cuda_floor.h"
#include "tests/bench/common/flags.h"
#include "tests/kernels/cuda/cuda_fp64.h"
#include "tests/kernels/cuda/cuda_problem.h"
#include "tests/kernels/support/figure_file.h"

namespace headwater::bench {
namespace {

using testing::Buffer;
using testing::BufferKind;
using testing::CheckCuda;
using testing::CheckStatus;

constexpr int64_t kVocab = 128256;
constexpr double kNoLimit = std::numeric_limits<double>::infinity();
// The rate of a copy on the device of an H200, read and written together.
constexpr double kBytesPerSecond = 4.2e12;

// The calls of a case for a micro-batch. One that trains is compared with the bare products. A loss with separate calls for forward
// and backward (docs/adr/0027) is compared with those calls of a plain cross entropy, made like held contributions.
struct Calls {
  bool trains = true;
  bool forward = false;        // outputs, no gradient
  bool backward = false;       // the gradient, by factors of each row
  bool entropy = false;        // as an output and with factors, beside loss and log-sum-exp
  bool other_outputs = false;  // mean_logits and log_sum_sq_probs
};

struct BenchCase {
  const char* name;
  int64_t rows;
  int64_t width;
  double at_most;
  int64_t teacher_width = 0;     // divergence of beta 1/2
  bool all_options = false;      // bias, smoothing, softcap, z-loss, class weights, every per-token output
  double ignored_share = 0;      // the floor computes all rows
  int64_t micro_batch_rows = 0;  // in micro-batches of so many rows, each by its own caller; 0: in one
  bool memory_bound = false;     // against the bytes that must move instead of the products
  Calls calls = {};
  int64_t top_k = 0;  // entries of a top-k teacher, instead of the teacher that the floor's products are of
};

// Forward KL to a top-k teacher, against the four products of a divergence to a whole one.
constexpr BenchCase TopK(const char* name, int64_t rows, double at_most, int64_t top_k) {
  BenchCase bench_case = {name, rows, 4096, at_most, 4096};
  bench_case.top_k = top_k;
  return bench_case;
}

// A case of 8192 rows that makes such calls.
constexpr BenchCase Factored(const char* name, double at_most, const Calls& calls) {
  BenchCase bench_case = {name, 8192, 4096, at_most};
  bench_case.calls = calls;
  return bench_case;
}

constexpr BenchCase kCases[] = {
    {"ce_n4096_h4096_v128256", 4096, 4096, 1.06},
    {"ce_n8192_h4096_v128256", 8192, 4096, 1.06},
    {"ce_n1024_h4096_v128256", 1024, 4096, 0.99},
    {"ce_n8192_h2048_v128256", 8192, 2048, 1.12},
    {"ce_options_n8192_h4096_v128256", 8192, 4096, 1.12, 0, true},
    {"jsd_n4096_hs4096_ht4096_v128256", 4096, 4096, 1.10, 4096},
    {"jsd_n8192_hs2048_ht4096_v128256", 8192, 2048, 1.12, 4096},
    TopK("top_k64_n4096_h4096_v128256", 4096, 0.85, 64),
    {"ce_half_ignored_n8192_h4096_v128256", 8192, 4096, 0.56, 0, false, 0.5},
    {"ce_16x256_h4096_v128256", 4096, 4096, 1.12, 0, false, 0, 256},
    {"ce_n1_h4096_v128256", 1, 4096, 1.5, 0, false, 0, 0, true},
    {"ce_n128_h4096_v128256", 128, 4096, 1.5, 0, false, 0, 0, true},
    {"ce_n256_h4096_v128256", 256, 4096, 1.5, 0, false, 0, 0, true},
    Factored("triple_n8192_h4096_v128256", 1.1, {false, true, true, true, true}),
    Factored("triple_forward_n8192_h4096_v128256", kNoLimit, {false, true, false, true, true}),
    Factored("triple_commit_n8192_h4096_v128256", kNoLimit, {false, false, true, true, true}),
    Factored("loss_lse_n8192_h4096_v128256", 1.02, {false, true, true, false, false}),
};

struct Settings {
  std::vector<std::string> cases;  // empty: all
  BlockOptions blocks;
  int64_t workspace_mib = 4096;
  std::string algorithms, output, commit = "unknown";
};

Settings ParseFlags(int argc, char** argv) {
  Settings settings;
  std::vector<std::string> names;
  for (const BenchCase& bench_case : kCases) names.push_back(bench_case.name);
  bool list = false;
  Flags flags;
  flags.Names("--cases", names, &settings.cases);
  flags.Blocks(&settings.blocks);
  flags.Number("--workspace-mib", 1, 1 << 20, &settings.workspace_mib);
  flags.Text("--algorithms", &settings.algorithms);
  flags.Text("--output", &settings.output);
  flags.Text("--commit", &settings.commit);
  flags.Switch("--list", &list);
  flags.Parse(argc, argv);
  if (list) {
    for (const std::string& name : names) std::printf("%s\n", name.c_str());
    std::exit(0);
  }
  return settings;
}

// Everything that cases share: weights on the device, heads, inputs of the floor.
class Workplace {
 public:
  explicit Workplace(const Settings& settings) {
    EngineOptions options;
    options.workspace_bytes = settings.workspace_mib << 20;
    options.algorithm_cache_path = settings.algorithms;
    absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(options);
    CheckStatus(engine.status(), "CreateCudaEngine");
    engine_ = *std::move(engine);
    CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  Workplace(const Workplace&) = delete;
  Workplace& operator=(const Workplace&) = delete;
  ~Workplace() {
    heads_.clear();
    cudaStreamDestroy(stream_);
  }

  LossEngine& engine() { return *engine_; }
  testing::BlasContext& blas() { return blas_; }
  cudaStream_t stream() const { return stream_; }
  CardMonitor& monitor() { return monitor_; }

  // Logits of standard deviation 1.
  const Buffer& Weight(int64_t width, bool is_teacher) {
    Buffer& weight = weights_[{width, is_teacher}];
    if (weight.bytes() == 0) {
      weight = Buffer(BufferKind::kDevice, kVocab * width * 2);
      CheckCuda(testing::FillNormal(weight.as<uint16_t>(), kVocab * width, is_teacher ? 12 : 11,
                                    1 / std::sqrt(static_cast<double>(width))),
                "FillNormal");
    }
    return weight;
  }

  EngineHead& Student(int64_t width, bool all_options) {
    std::unique_ptr<EngineHead>& head = heads_[{width, all_options ? 1 : 0}];
    if (head == nullptr) {
      HeadSpec spec = testing::BFloat16Head({"", 0, width, kVocab}, /*trainable=*/true);
      spec.has_bias = all_options;
      if (all_options) spec.transform.softcap = 30;
      head = testing::MakeHeadOn(*engine_, spec);
      testing::WriteWeight(*head, Weight(width, false));
      if (all_options) {
        Buffer bias(BufferKind::kDevice, kVocab * 2);
        CheckCuda(testing::FillNormal(bias.as<uint16_t>(), kVocab, 13, 0.5), "FillNormal");
        std::vector<uint16_t> host(static_cast<size_t>(kVocab));
        testing::CopyMemory(host.data(), bias.as<void>(), bias.bytes());
        CheckStatus(head->WriteTensor(HeadTensor::kBias, 0, kVocab, host.data()), "WriteTensor");
      }
    }
    return *head;
  }

  EngineHead& Teacher(int64_t width) {
    std::unique_ptr<EngineHead>& head = heads_[{width, 2}];
    if (head == nullptr) {
      head = testing::MakeHeadOn(*engine_, testing::BFloat16Head({"", 0, width, kVocab}, /*trainable=*/false));
      testing::WriteWeight(*head, Weight(width, true));
    }
    return *head;
  }

 private:
  std::unique_ptr<LossEngine> engine_;
  cudaStream_t stream_ = nullptr;
  testing::BlasContext blas_;
  CardMonitor monitor_{testing::GpuBusId()};
  std::map<std::pair<int64_t, bool>, Buffer> weights_;
  std::map<std::pair<int64_t, int>, std::unique_ptr<EngineHead>> heads_;
};

// One case: inputs, the engine's call, the floor's.
class Runner {
 public:
  Runner(const BenchCase& bench_case, Workplace& workplace)
      : case_(bench_case),
        workplace_(workplace),
        hidden_(Normal(bench_case.rows, bench_case.width, 21)),
        grad_hidden_(BufferKind::kDevice, hidden_.bytes()),
        head_(workplace.Student(bench_case.width, bench_case.all_options)) {
    std::mt19937_64 random(31);
    for (int64_t i = 0; i < case_.rows; ++i) {
      targets_.push_back(static_cast<int32_t>(std::uniform_int_distribution<int64_t>(0, kVocab - 1)(random)));
    }
    device_targets_ = Buffer(BufferKind::kDevice, case_.rows * static_cast<int64_t>(sizeof(int32_t)));
    testing::CopyMemory(device_targets_.as<void>(), targets_.data(), device_targets_.bytes());
    // Exactly that share, anywhere.
    std::vector<size_t> order(targets_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    order.resize(static_cast<size_t>(std::lround(case_.ignored_share * static_cast<double>(case_.rows))));
    for (const size_t row : order) targets_[row] = kDefaultIgnoreIndex;
    if (case_.teacher_width > 0) {
      teacher_hidden_ = Normal(case_.rows, case_.teacher_width, 22);
      if (case_.top_k == 0) teacher_ = &workplace.Teacher(case_.teacher_width);
    }
    for (int64_t i = 0; i < case_.rows * case_.top_k; ++i) {
      // Different ones in a row, anywhere in the vocabulary.
      top_k_ids_.push_back(static_cast<int32_t>((i / case_.top_k * 7919 + i % case_.top_k * 1999) % kVocab));
      top_k_log_probs_.push_back(static_cast<float>(std::log(0.9 / static_cast<double>(case_.top_k))));
    }
    if (case_.all_options) {
      for (int64_t v = 0; v < kVocab; ++v) class_weights_.push_back(0.5f + 0.25f * static_cast<float>(v % 5));
      for (std::vector<float>* output : {&token_loss_, &lse_, &target_log_probability_, &entropy_}) output->resize(targets_.size());
      argmax_.resize(targets_.size());
    }
    if (!case_.calls.trains) {
      std::normal_distribution<float> normal;
      for (std::vector<float>* factors : {&token_weights_, &entropy_factors_, &lse_factors_}) {
        for (int64_t i = 0; i < case_.rows; ++i) factors->push_back(normal(random));
      }
      for (std::vector<float>* output : {&token_loss_, &lse_, &entropy_, &mean_logits_, &log_sum_sq_probs_}) {
        output->resize(targets_.size());
      }
    }
    CheckCuda(cudaDeviceSynchronize(), "making inputs");
    CheckStatus(head_.ZeroGradient(), "ZeroGradient");
  }

  // The whole of the rows, so many times; micro-batches each by a caller of its own. Throws unless the losses can be those of the
  // rows.
  void RunEngine(int count) {
    if (!case_.calls.trains) {
      for (int i = 0; i < count; ++i) MakeCalls(/*is_plain=*/false);
      return;
    }
    if (case_.micro_batch_rows == 0) {
      for (int i = 0; i < count; ++i) ComputeRows(0, case_.rows);
      return;
    }
    std::vector<std::future<void>> callers;
    for (int64_t start = 0; start < case_.rows; start += case_.micro_batch_rows) {
      callers.push_back(std::async(std::launch::async, [this, start, count] {
        for (int i = 0; i < count; ++i) ComputeRows(start, case_.micro_batch_rows);
      }));
    }
    for (std::future<void>& caller : callers) caller.get();
  }

  BlockTimes Measure(const BlockOptions& options) {
    const Repeat candidate = [this](int count) {
      RunEngine(count);
      CheckCuda(cudaDeviceSynchronize(), "the engine's last products");
    };
    if (!case_.calls.trains) {
      const double product = 2.0 * static_cast<double>(case_.rows * case_.width * kVocab);
      floor_flop_ = product * (case_.calls.forward ? 1 : 0) + product * (case_.calls.backward ? 3 : 0);
      const Repeat plain = [this](int count) {
        for (int i = 0; i < count; ++i) MakeCalls(/*is_plain=*/true);
        CheckCuda(cudaDeviceSynchronize(), "the engine's last products");
      };
      return TimeAlternately(plain, candidate, options, workplace_.monitor());
    }
    if (case_.memory_bound)
      return TimeAgainst(1000 * BytesThatMustMove() / kBytesPerSecond, candidate, options, workplace_.monitor());
    FloorInputs inputs = {.rows = case_.rows,
                          .width = case_.width,
                          .vocab = kVocab,
                          .hidden = &hidden_,
                          .weight = &workplace_.Weight(case_.width, false),
                          .targets = &device_targets_,
                          .teacher_width = case_.teacher_width};
    if (case_.teacher_width > 0) {
      inputs.teacher_hidden = &teacher_hidden_;
      inputs.teacher_weight = &workplace_.Weight(case_.teacher_width, true);
    }
    const Floor floor(workplace_.blas(), inputs);
    floor_flop_ = floor.flop();
    const Repeat products = [&](int count) {
      for (int i = 0; i < count; ++i) floor.Enqueue(workplace_.stream());
      CheckCuda(cudaStreamSynchronize(workplace_.stream()), "the products");
    };
    return TimeAlternately(products, candidate, options, workplace_.monitor());
  }

  double floor_flop() const { return floor_flop_; }
  const MemoryPlan& plan() const { return head_.plan(); }

 private:
  static Buffer Normal(int64_t rows, int64_t columns, uint64_t seed) {
    Buffer values(BufferKind::kDevice, rows * columns * 2);
    CheckCuda(testing::FillNormal(values.as<uint16_t>(), rows * columns, seed, 1), "FillNormal");
    return values;
  }

  // The weight twice, for logits and grad_hidden, and the accumulator read and written.
  double BytesThatMustMove() const { return static_cast<double>(kVocab * case_.width) * (2 * 2 + 2 * 4); }

  void ComputeRows(int64_t start, int64_t count) {
    const size_t first = static_cast<size_t>(start);
    LossTerm term;
    term.head = &head_;
    term.row_count = count;
    term.targets = absl::MakeConstSpan(targets_).subspan(first, static_cast<size_t>(count));
    term.loss_scale = 0.37 / static_cast<double>(case_.rows);
    if (case_.top_k > 0) {
      const size_t entry = first * static_cast<size_t>(case_.top_k), entries = static_cast<size_t>(count * case_.top_k);
      term.loss = TopKSpec{static_cast<int32_t>(case_.top_k), absl::MakeConstSpan(top_k_ids_).subspan(entry, entries),
                           absl::MakeConstSpan(top_k_log_probs_).subspan(entry, entries)};
    } else if (teacher_ != nullptr) {
      term.loss = JsdSpec();
      term.teacher_head = teacher_;
      term.teacher_hidden = {teacher_hidden_.as<uint8_t>() + start * case_.teacher_width * 2, count, case_.teacher_width,
                             DataType::kBFloat16, MemorySpace::kDevice};
    } else if (case_.all_options) {
      term.loss = CrossEntropySpec{0.1, 1e-4, class_weights_};
      term.token_loss = &token_loss_[first];
      term.lse = &lse_[first];
      term.target_log_probability = &target_log_probability_[first];
      term.entropy = &entropy_[first];
      term.argmax = &argmax_[first];
    }
    Compute(term, start, count, /*backward=*/true);
  }

  // The calls of the case for all rows; plain ones of a cross entropy whose rows have weights.
  void MakeCalls(bool is_plain) {
    LossTerm term;
    term.head = &head_;
    term.row_count = case_.rows;
    term.targets = targets_;
    term.loss_scale = 0.37 / static_cast<double>(case_.rows);
    const bool with_entropy = case_.calls.entropy && !is_plain;
    if (case_.calls.forward) {
      LossTerm outputs = term;
      outputs.token_loss = token_loss_.data();
      if (!is_plain) outputs.lse = lse_.data();
      if (with_entropy) outputs.entropy = entropy_.data();
      if (case_.calls.other_outputs && !is_plain) {
        outputs.mean_logits = mean_logits_.data();
        outputs.log_sum_sq_probs = log_sum_sq_probs_.data();
      }
      Compute(outputs, 0, case_.rows, /*backward=*/false);
    }
    if (case_.calls.backward) {
      term.token_weights = token_weights_;
      if (!is_plain) term.lse_factors = lse_factors_;
      if (with_entropy) term.entropy_factors = entropy_factors_;
      Compute(term, 0, case_.rows, /*backward=*/true);
    }
  }

  void Compute(const LossTerm& term, int64_t start, int64_t count, bool backward) {
    const int64_t row_bytes = case_.width * 2;
    MicroBatch micro_batch;
    micro_batch.hidden = {hidden_.as<uint8_t>() + start * row_bytes, count, case_.width, DataType::kBFloat16, MemorySpace::kDevice};
    micro_batch.terms = absl::MakeConstSpan(&term, 1);
    micro_batch.backward = backward;
    if (backward) {
      micro_batch.grad_hidden = {grad_hidden_.as<uint8_t>() + start * row_bytes, count, case_.width, DataType::kBFloat16,
                                 MemorySpace::kDevice};
      micro_batch.grad_weight = GradWeightMode::kAccumulate;
    }
    const absl::StatusOr<MicroBatchResult> result = workplace_.engine().Compute(micro_batch);
    CheckStatus(result.status(), "Compute");
    const LossSums& sums = result->terms[0];
    const double mean = sums.loss_sum / static_cast<double>(sums.valid_token_count);
    // With weights of either sign it may be anything small.
    const double least = term.token_weights.empty() ? 0.01 : -20;
    if (!(mean > least && mean < 20) || sums.non_finite_row_count != 0) throw std::runtime_error("the engine computed nonsense");
  }

  const BenchCase& case_;
  Workplace& workplace_;
  Buffer hidden_, grad_hidden_, teacher_hidden_, device_targets_;
  std::vector<int32_t> targets_;
  std::vector<float> class_weights_, token_loss_, lse_, target_log_probability_, entropy_, mean_logits_, log_sum_sq_probs_;
  std::vector<float> token_weights_, entropy_factors_, lse_factors_;
  std::vector<int32_t> argmax_, top_k_ids_;
  std::vector<float> top_k_log_probs_;
  EngineHead& head_;
  EngineHead* teacher_ = nullptr;
  double floor_flop_ = 0;
};

double WorkspaceMiB(const MemoryPlan& plan) {
  int64_t bytes = 0;
  for (const MemoryPlan::Item& item : plan.items) bytes += item.purpose == "workspace" ? item.bytes : 0;
  return static_cast<double>(bytes) / (1 << 20);
}

void Report(const BenchCase& bench_case, const BlockTimes& times, const Runner& runner, testing::FigureFile* figures) {
  const std::string name = std::string("cuda_") + bench_case.name;
  const char* ratio_unit = !bench_case.calls.trains  ? "x plain calls"
                           : bench_case.memory_bound ? "x bytes at 4.2 TB/s"
                                                     : "x products";
  std::optional<double> at_most;
  if (bench_case.at_most < kNoLimit) at_most = bench_case.at_most;
  figures->Add({name + "_ratio", times.ratio, ratio_unit, at_most});
  figures->Add({name + "_spread", times.ratio_spread, "(max-min)/median", {}});
  figures->Add({name + "_burst_ratio", times.burst_ratio, ratio_unit, {}});
  figures->Add({name + "_ms", times.candidate_ms, "ms", {}});
  figures->Add({name + "_floor_ms", times.floor_ms, "ms", {}});
  figures->Add({name + "_sm_mhz", times.candidate_card.sm_mhz, "MHz", {}});
  figures->Add({name + "_watts", times.candidate_card.watts, "W", {}});
  figures->Add({name + "_celsius", times.candidate_card.celsius, "degrees", {}});
  figures->Add({name + "_throttle_reasons", static_cast<double>(times.candidate_card.throttle_reasons), "NVML bits", {}});
  figures->Add({name + "_workspace_mib", WorkspaceMiB(runner.plan()), "MiB", {}});
  if (!bench_case.memory_bound) figures->Add({name + "_floor_sm_mhz", times.floor_card.sm_mhz, "MHz", {}});
  std::printf("%-38s %9.3f %9.3f %7.4f %7.4f %6.2f %7.4f %7.0f %5.0f %5.0f %4.0f  0x%llx%s\n", bench_case.name, times.candidate_ms,
              times.floor_ms, times.ratio, times.ratio_spread, bench_case.at_most, times.burst_ratio,
              bench_case.memory_bound ? 0 : runner.floor_flop() / times.candidate_ms * 1e-9, times.candidate_card.sm_mhz,
              times.candidate_card.watts, times.candidate_card.celsius,
              static_cast<unsigned long long>(times.candidate_card.throttle_reasons),
              times.ratio <= bench_case.at_most ? "" : "  over what is required");
  std::fflush(stdout);
}

// 1 if a figure misses what is required, or the file cannot be written.
int RunAll(const Settings& settings) {
  const std::string machine = testing::GpuName();
  testing::FigureFile figures(settings.output, machine, settings.commit);
  Workplace workplace(settings);
  std::printf("%s; %g s warm-up, blocks of %g s, %d rounds\n", machine.c_str(), settings.blocks.warmup_seconds,
              settings.blocks.block_seconds, settings.blocks.rounds);
  std::printf("%-38s %9s %9s %7s %7s %6s %7s %7s %5s %5s %4s  %s\n", "case", "ms", "floor ms", "ratio", "spread", "limit", "burst",
              "TFLOP/s", "MHz", "W", "C", "throttle");
  int missed = 0;
  for (const BenchCase& bench_case : kCases) {
    const bool chosen =
        settings.cases.empty() || std::find(settings.cases.begin(), settings.cases.end(), bench_case.name) != settings.cases.end();
    if (!chosen) continue;
    Runner runner(bench_case, workplace);
    const BlockTimes times = runner.Measure(settings.blocks);
    Report(bench_case, times, runner, &figures);
    if (!(times.ratio <= bench_case.at_most)) ++missed;
    // After every case: a run that is cut short has kept what it has.
    const std::string error = figures.Write();
    if (!error.empty()) {
      std::fprintf(stderr, "%s\n", error.c_str());
      return 1;
    }
  }
  if (missed > 0) std::printf("%d figures are over what is required\n", missed);
  return missed > 0 ? 1 : 0;
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) {
  const headwater::bench::Settings settings = headwater::bench::ParseFlags(argc, argv);
  return headwater::bench::RunUnless(headwater::testing::ReasonForNoGpu(), [&] { return headwater::bench::RunAll(settings); });
}
