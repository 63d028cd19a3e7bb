// The CPU engine's speed and memory at one shape: cross entropy, forward and backward with grad_weight.
//
//   engine_bench_cpu --measure=time     three bare OpenBLAS products, fp32 and bf16 storage, interleaved in one process; medians
//   engine_bench_cpu --measure=commit   a contribution that is staged and committed against one that is added in place
//   engine_bench_cpu --measure=memory --type=float32    peak memory of one computation beyond what any implementation must hold
//
// Prints CSV rows `case,value,unit` to standard output, and what was measured in words to standard error.
#include <cblas.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "headwater/kernels/engine.h"
#include "tests/bench/common/statistics.h"
#include "tests/bench/engine/bench_support.h"

namespace headwater::bench {
namespace {

// `VmRSS` or `VmHWM` of this process in bytes.
int64_t ResidentBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind(field + ":", 0) == 0) return std::atoll(line.c_str() + field.size() + 1) * 1024;
  }
  Fail("no " + field + " in /proc/self/status");
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

void MeasureTime(const Settings& settings) {
  const std::unique_ptr<LossEngine> engine = ValueOrFail(CreateCpuEngine({}));
  Products products(settings, engine->options().thread_count);
  Rows rows_fp32(settings, DataType::kFloat32);
  Rows rows_bf16(settings, DataType::kBFloat16);
  const std::unique_ptr<EngineHead> head_fp32 = MakeHead(*engine, SpecOf(settings, DataType::kFloat32));
  const std::unique_ptr<EngineHead> head_bf16 = MakeHead(*engine, SpecOf(settings, DataType::kBFloat16));
  std::vector<Candidate> candidates;
  candidates.push_back({"cpu_openblas_products", [&] { products.Run(); }, {}});
  candidates.push_back({"cpu_cross_entropy_float32", [&] { Compute(*engine, *head_fp32, rows_fp32); }, {}});
  candidates.push_back({"cpu_cross_entropy_bfloat16", [&] { Compute(*engine, *head_bf16, rows_bf16); }, {}});
  TimeInterleaved(settings.rounds, &candidates);
  const double flop = 6.0 * static_cast<double>(settings.rows) * static_cast<double>(settings.hidden_size) *
                      static_cast<double>(settings.vocab_size);
  const double baseline = Median(candidates[0].seconds);
  for (const Candidate& candidate : candidates) {
    const double median = Median(candidate.seconds);
    PrintTimes(candidate);
    if (&candidate != &candidates[0]) std::printf("%s_ratio,%.3f,x products\n", candidate.name.c_str(), median / baseline);
    std::fprintf(stderr, "%-28s median %.3f s, spread %.1f %%, %.0f GFLOP/s of products, %.3f x products\n", candidate.name.c_str(),
                 median, 100 * Spread(candidate.seconds), flop / median / 1e9, median / baseline);
  }
  PrintSettings(settings, engine->options().thread_count);
}

void MeasureCommit(const Settings& settings) {
  const std::unique_ptr<LossEngine> engine = ValueOrFail(CreateCpuEngine({}));
  Rows rows(settings, settings.type);
  const std::unique_ptr<EngineHead> head = MakeHead(*engine, SpecOf(settings, settings.type, /*staging_slots=*/1));
  std::vector<Candidate> candidates;
  candidates.push_back({"cpu_eager", [&] { Compute(*engine, *head, rows); }, {}});
  candidates.push_back(
      {"cpu_explicit", [&] { Check(Compute(*engine, *head, rows, GradWeightMode::kStage).staged->Commit(1)); }, {}});
  TimeInterleaved(settings.rounds, &candidates);
  for (const Candidate& candidate : candidates) PrintTimes(candidate);
  const double ratio = MedianRatio(candidates[1], candidates[0]);
  std::printf("cpu_explicit_over_eager,%.4f,x in place\n", ratio);
  std::fprintf(stderr, "staged and committed: %.3f s, in place: %.3f s; median ratio of a round %.4f\n",
               Median(candidates[1].seconds), Median(candidates[0].seconds), ratio);
  PrintSettings(settings, engine->options().thread_count);
}

void MeasureMemory(const Settings& settings) {
  // What must be there in any case: rows and weight in their type, gradients of rows (same type) and weight (fp32).
  const int64_t row_elements = settings.rows * settings.hidden_size;
  const int64_t weight_elements = settings.vocab_size * settings.hidden_size;
  const int64_t element_bytes = ElementBytes(settings.type);
  const int64_t tensors = 2 * row_elements * element_bytes + weight_elements * (element_bytes + 4);
  // Rows before the baseline: making them takes temporary memory that is not the engine's.
  Rows rows(settings, settings.type);
  std::ofstream("/proc/self/clear_refs") << "5";  // VmHWM starts again from what is resident now
  const int64_t before = ResidentBytes("VmRSS") - 2 * row_elements * element_bytes;
  const std::unique_ptr<LossEngine> engine = ValueOrFail(CreateCpuEngine({}));
  const std::unique_ptr<EngineHead> head = MakeHead(*engine, SpecOf(settings, settings.type));
  for (int round = 0; round < 2; ++round) Compute(*engine, *head, rows);
  const int64_t peak = ResidentBytes("VmHWM") - before - tensors;
  const char* type = DataTypeName(settings.type);
  std::printf("cpu_cross_entropy_%s_peak_bytes,%lld,bytes\n", type, static_cast<long long>(peak));
  std::fprintf(stderr, "%s: peak %.1f MiB beyond rows, weight and their gradients; plan: %s\n", type,
               static_cast<double>(peak) / (1 << 20), head->plan().ToString().c_str());
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) {
  const headwater::bench::Settings settings = headwater::bench::ParseFlags(argc, argv, {"time", "commit", "memory"});
  if (settings.measure == "time") {
    headwater::bench::MeasureTime(settings);
  } else if (settings.measure == "commit") {
    headwater::bench::MeasureCommit(settings);
  } else {
    headwater::bench::MeasureMemory(settings);
  }
  return 0;
}
