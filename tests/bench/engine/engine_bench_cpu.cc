// The CPU engine's speed and memory at one shape: cross entropy, forward and backward with grad_weight.
//
//   engine_bench_cpu --measure=time     three bare OpenBLAS products, fp32 and bf16 storage, interleaved in one process; medians
//   engine_bench_cpu --measure=memory --type=float32    peak memory of one computation beyond what any implementation must hold
//
// Prints CSV rows `case,value,unit` to standard output, and what was measured in words to standard error.
#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/reference/storage.h"

namespace headwater {
namespace {

struct Settings {
  std::string measure = "time";
  std::string type = "float32";
  int64_t rows = 512;
  int64_t hidden_size = 1024;
  int64_t vocab_size = 32000;
  int rounds = 9;
};

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "engine_bench_cpu: %s\n", message.c_str());
  std::exit(1);
}

void Check(const absl::Status& status) {
  if (!status.ok()) Fail(status.ToString());
}

template <typename T>
T ValueOrFail(absl::StatusOr<T> result) {
  Check(result.status());
  return *std::move(result);
}

// `VmRSS` or `VmHWM` of this process in bytes.
int64_t ResidentBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind(field + ":", 0) == 0) return std::atoll(line.c_str() + field.size() + 1) * 1024;
  }
  Fail("no " + field + " in /proc/self/status");
}

std::vector<float> RandomFloats(int64_t count, float standard_deviation, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, standard_deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// The rows of a job, in the engine's types.
struct Rows {
  std::vector<uint8_t> hidden;
  std::vector<uint8_t> grad_hidden;
  std::vector<int32_t> targets;
};

Rows MakeRows(const Settings& settings, DataType type) {
  Rows rows;
  const std::vector<float> hidden = RandomFloats(settings.rows * settings.hidden_size, 1, 2);
  rows.hidden = reference::Encode(type, std::vector<double>(hidden.begin(), hidden.end()));
  rows.grad_hidden.resize(rows.hidden.size());
  for (int64_t i = 0; i < settings.rows; ++i) rows.targets.push_back(static_cast<int32_t>((i * 7919) % settings.vocab_size));
  return rows;
}

std::unique_ptr<EngineHead> MakeHead(LossEngine& engine, const Settings& settings, DataType type) {
  HeadSpec spec;
  spec.vocab_size = settings.vocab_size;
  spec.hidden_size = settings.hidden_size;
  spec.data_type = type;
  spec.transform.valid_vocab_size = settings.vocab_size;
  spec.trainable = true;
  std::unique_ptr<EngineHead> head = ValueOrFail(engine.CreateHead(spec));
  // Row by row, so that no second copy of the weight is ever resident.
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal(0, 0.05);
  std::vector<double> row(static_cast<size_t>(settings.hidden_size));
  for (int64_t v = 0; v < settings.vocab_size; ++v) {
    for (double& value : row) value = normal(random);
    Check(head->WriteTensor(HeadTensor::kWeight, v * settings.hidden_size, settings.hidden_size,
                            reference::Encode(type, row).data()));
  }
  Check(head->ZeroGradient());
  return head;
}

void Compute(LossEngine& engine, EngineHead& head, const Settings& settings, Rows& rows) {
  const DataType type = head.spec().data_type;
  LossTerm term;
  term.head = &head;
  term.row_count = settings.rows;
  term.targets = rows.targets;
  MicroBatch micro_batch;
  micro_batch.hidden = {rows.hidden.data(), settings.rows, settings.hidden_size, type};
  micro_batch.terms = absl::MakeConstSpan(&term, 1);
  micro_batch.backward = true;
  micro_batch.grad_hidden = {rows.grad_hidden.data(), settings.rows, settings.hidden_size, type};
  micro_batch.grad_weight = GradWeightMode::kAccumulate;
  const MicroBatchResult result = ValueOrFail(engine.Compute(micro_batch));
  if (result.terms[0].valid_token_count != settings.rows || !(result.terms[0].loss_sum > 0)) Fail("the engine computed nonsense");
}

// logits = hidden . weight^T, grad_hidden = grad_logits . weight, grad_weight = grad_logits^T . hidden, in fp32 on all cores.
class Products {
 public:
  Products(const Settings& settings, int thread_count)
      : n_(static_cast<int>(settings.rows)),
        h_(static_cast<int>(settings.hidden_size)),
        v_(static_cast<int>(settings.vocab_size)),
        thread_count_(thread_count),
        hidden_(RandomFloats(settings.rows * settings.hidden_size, 1, 2)),
        weight_(RandomFloats(settings.vocab_size * settings.hidden_size, 0.05f, 1)),
        logits_(static_cast<size_t>(settings.rows * settings.vocab_size)),
        grad_hidden_(hidden_.size()),
        grad_weight_(weight_.size()) {}

  void Run() {
    // The engine may have set another number for its own calls.
    const int before = openblas_get_num_threads();
    openblas_set_num_threads(thread_count_);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_, v_, h_, 1, hidden_.data(), h_, weight_.data(), h_, 0, logits_.data(),
                v_);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n_, h_, v_, 1, logits_.data(), v_, weight_.data(), h_, 0,
                grad_hidden_.data(), h_);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, v_, h_, n_, 1, logits_.data(), v_, hidden_.data(), h_, 0,
                grad_weight_.data(), h_);
    openblas_set_num_threads(before);
  }

 private:
  const int n_, h_, v_, thread_count_;
  const std::vector<float> hidden_, weight_;
  std::vector<float> logits_, grad_hidden_, grad_weight_;
};

double Seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// (largest - smallest) / median.
double Spread(const std::vector<double>& values) {
  const auto [smallest, largest] = std::minmax_element(values.begin(), values.end());
  return (*largest - *smallest) / Median(values);
}

void MeasureTime(const Settings& settings) {
  const std::unique_ptr<LossEngine> engine = ValueOrFail(CreateCpuEngine({}));
  const int thread_count = engine->options().thread_count;
  Products products(settings, thread_count);
  Rows rows_fp32 = MakeRows(settings, DataType::kFloat32);
  Rows rows_bf16 = MakeRows(settings, DataType::kBFloat16);
  const std::unique_ptr<EngineHead> head_fp32 = MakeHead(*engine, settings, DataType::kFloat32);
  const std::unique_ptr<EngineHead> head_bf16 = MakeHead(*engine, settings, DataType::kBFloat16);

  struct Candidate {
    const char* name;
    std::function<void()> body;
    std::vector<double> seconds;
  };
  std::vector<Candidate> candidates;
  candidates.push_back({"cpu_openblas_products", [&] { products.Run(); }, {}});
  candidates.push_back({"cpu_cross_entropy_float32", [&] { Compute(*engine, *head_fp32, settings, rows_fp32); }, {}});
  candidates.push_back({"cpu_cross_entropy_bfloat16", [&] { Compute(*engine, *head_bf16, settings, rows_bf16); }, {}});
  // Round 0 warms up: first touch of buffers, clock.
  for (int round = 0; round <= settings.rounds; ++round) {
    for (Candidate& candidate : candidates) {
      const double seconds = Seconds(candidate.body);
      if (round > 0) candidate.seconds.push_back(seconds);
    }
  }
  const double flop = 6.0 * static_cast<double>(settings.rows) * static_cast<double>(settings.hidden_size) *
                      static_cast<double>(settings.vocab_size);
  const double baseline = Median(candidates[0].seconds);
  for (const Candidate& candidate : candidates) {
    const double median = Median(candidate.seconds);
    std::printf("%s_seconds,%.4f,s\n", candidate.name, median);
    std::printf("%s_spread,%.3f,(max-min)/median\n", candidate.name, Spread(candidate.seconds));
    if (&candidate != &candidates[0]) std::printf("%s_ratio,%.3f,x products\n", candidate.name, median / baseline);
    std::fprintf(stderr, "%-28s median %.3f s, spread %.1f %%, %.0f GFLOP/s of products, %.3f x products\n", candidate.name, median,
                 100 * Spread(candidate.seconds), flop / median / 1e9, median / baseline);
  }
  std::fprintf(stderr, "N=%lld H=%lld V=%lld, %d rounds, %d threads\n", static_cast<long long>(settings.rows),
               static_cast<long long>(settings.hidden_size), static_cast<long long>(settings.vocab_size), settings.rounds,
               thread_count);
}

void MeasureMemory(const Settings& settings) {
  const DataType type = settings.type == "float32" ? DataType::kFloat32 : DataType::kBFloat16;
  // What must be there in any case: rows and weight in their type, gradients of rows (same type) and weight (fp32).
  const int64_t row_elements = settings.rows * settings.hidden_size;
  const int64_t weight_elements = settings.vocab_size * settings.hidden_size;
  const int64_t tensors = 2 * row_elements * ElementBytes(type) + weight_elements * (ElementBytes(type) + 4);
  // Rows before the baseline: making them takes temporary memory that is not the engine's.
  Rows rows = MakeRows(settings, type);
  std::ofstream("/proc/self/clear_refs") << "5";  // VmHWM starts again from what is resident now
  const int64_t before = ResidentBytes("VmRSS") - 2 * row_elements * ElementBytes(type);
  const std::unique_ptr<LossEngine> engine = ValueOrFail(CreateCpuEngine({}));
  const std::unique_ptr<EngineHead> head = MakeHead(*engine, settings, type);
  for (int round = 0; round < 2; ++round) Compute(*engine, *head, settings, rows);
  const int64_t peak = ResidentBytes("VmHWM") - before - tensors;
  std::printf("cpu_cross_entropy_%s_peak_bytes,%lld,bytes\n", settings.type.c_str(), static_cast<long long>(peak));
  std::fprintf(stderr, "%s: peak %.1f MiB beyond rows, weight and their gradients; plan: %s\n", settings.type.c_str(),
               static_cast<double>(peak) / (1 << 20), head->plan().ToString().c_str());
}

Settings ParseFlags(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const size_t equals = flag.find('=');
    const std::string name = flag.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : flag.substr(equals + 1);
    const int64_t number = std::atoll(value.c_str());
    if (name == "--measure" && (value == "time" || value == "memory")) {
      settings.measure = value;
    } else if (name == "--type" && (value == "float32" || value == "bfloat16")) {
      settings.type = value;
    } else if (name == "--rounds" && number > 0 && number <= 1000) {
      settings.rounds = static_cast<int>(number);
    } else if (name == "--rows" && number > 0 && number <= (1 << 20)) {
      settings.rows = number;
    } else if (name == "--hidden" && number > 0 && number <= (1 << 16)) {
      settings.hidden_size = number;
    } else if (name == "--vocab" && number > 0 && number <= (1 << 20)) {
      settings.vocab_size = number;
    } else {
      Fail("unknown flag " + flag + "; --measure=time|memory --type=float32|bfloat16 --rows=N --hidden=N --vocab=N --rounds=N");
    }
  }
  return settings;
}

}  // namespace
}  // namespace headwater

int main(int argc, char** argv) {
  const headwater::Settings settings = headwater::ParseFlags(argc, argv);
  if (settings.measure == "time") {
    headwater::MeasureTime(settings);
  } else {
    headwater::MeasureMemory(settings);
  }
  return 0;
}
