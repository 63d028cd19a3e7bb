// The CPU engine's speed and memory at one shape: cross entropy, forward and backward with grad_weight.
//
//   engine_bench_cpu --measure=time     three bare products of OpenBLAS in fp32 and of oneDNN in bf16, fp32 and bf16 storage,
//                                       interleaved in one process; medians
//   engine_bench_cpu --measure=turns    reads the name of a case a line, and answers with its seconds: by the clock, of processor
//   time engine_bench_cpu --measure=commit   a contribution that is staged and committed against one that is added in place
//   engine_bench_cpu --measure=memory --type=float32    peak memory of one computation beyond what any implementation must hold
//
// Prints CSV rows `case,value,unit` to standard output (turns: first a line that names the libraries of the engine's products).
// Prints the measurements in words to standard error.
#include <cblas.h>
#include <malloc.h>
#include <time.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "headwater/kernels/engine.h"
#include "headwater/kernels/product_rate.h"
#include "kernels/cpu/products/bfloat16_products.h"
#include "kernels/cpu/thread_pool.h"
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

// The products of bf16 operands, into fp32: each core has its columns of the vocabulary, or of grad_hidden.
class OneDnnProducts {
 public:
  OneDnnProducts(const Settings& settings, int thread_count)
      : n_(settings.rows),
        h_(settings.hidden_size),
        v_(settings.vocab_size),
        pool_(thread_count),
        hidden_(static_cast<size_t>(n_ * h_), 0x3F80),
        weight_(static_cast<size_t>(v_ * h_), 0x3D4D),
        gradient_(static_cast<size_t>(n_ * v_), 0x3A03),
        logits_(static_cast<size_t>(n_ * v_)),
        grad_hidden_(hidden_.size()),
        grad_weight_(weight_.size()) {}

  void Run() {
    const auto part = [&](int64_t columns, int32_t index) { return columns * index / pool_.thread_count(); };
    pool_.Run(pool_.thread_count(), [&](int32_t index) {
      const int64_t start = part(v_, index);
      const int64_t count = part(v_, index + 1) - start;
      cpu::MultiplyTransposed(n_, count, h_, {hidden_.data(), h_}, {weight_.data() + start * h_, h_}, {logits_.data() + start, v_});
      cpu::MultiplyFirstTransposed(count, h_, n_, 1, {gradient_.data() + start, v_}, {hidden_.data(), h_}, 1,
                                   {grad_weight_.data() + start * h_, h_});
    });
    pool_.Run(pool_.thread_count(), [&](int32_t index) {
      const int64_t start = part(h_, index);
      cpu::Multiply(n_, part(h_, index + 1) - start, v_, {gradient_.data(), v_}, {weight_.data() + start, h_}, 0,
                    {grad_hidden_.data() + start, h_});
    });
  }

 private:
  const int64_t n_, h_, v_;
  cpu::ThreadPool pool_;
  const std::vector<uint16_t> hidden_, weight_, gradient_;
  std::vector<float> logits_, grad_hidden_, grad_weight_;
};

void MeasureTime(const Settings& settings) {
  const std::unique_ptr<LossEngine> engine = ValueOrFail(CreateCpuEngine({}));
  const bool has_onednn = cpu::GetBfloat16Library().is_usable;
  Products products(settings, engine->options().thread_count);
  std::optional<OneDnnProducts> onednn_products;
  if (has_onednn) onednn_products.emplace(settings, engine->options().thread_count);
  Rows rows_fp32(settings, DataType::kFloat32);
  Rows rows_bf16(settings, DataType::kBFloat16);
  const std::unique_ptr<EngineHead> head_fp32 = MakeHead(*engine, SpecOf(settings, DataType::kFloat32));
  const std::unique_ptr<EngineHead> head_bf16 = MakeHead(*engine, SpecOf(settings, DataType::kBFloat16));
  std::vector<Candidate> candidates;
  candidates.push_back({"cpu_openblas_products", [&] { products.Run(); }, {}});
  candidates.push_back({"cpu_cross_entropy_float32", [&] { Compute(*engine, *head_fp32, rows_fp32); }, {}});
  candidates.push_back({"cpu_cross_entropy_bfloat16", [&] { Compute(*engine, *head_bf16, rows_bf16); }, {}});
  if (has_onednn) candidates.push_back({"cpu_onednn_products", [&] { onednn_products->Run(); }, {}});
  TimeInterleaved(settings.rounds, &candidates);
  const double flop = 6.0 * static_cast<double>(settings.rows) * static_cast<double>(settings.hidden_size) *
                      static_cast<double>(settings.vocab_size);
  for (const Candidate& candidate : candidates) {
    const double median = Median(candidate.seconds);
    PrintTimes(candidate);
    const double ratio = MedianRatio(candidate, candidates[0]);
    if (&candidate != &candidates[0]) std::printf("%s_ratio,%.3f,x products\n", candidate.name.c_str(), ratio);
    std::fprintf(stderr, "%-28s median %.3f s, spread %.1f %%, %.0f GFLOP/s of products, %.3f x products\n", candidate.name.c_str(),
                 median, 100 * Spread(candidate.seconds), flop / median / 1e9, ratio);
  }
  if (has_onednn) {
    std::printf("cpu_cross_entropy_bfloat16_of_onednn_products,%.3f,x products\n", MedianRatio(candidates[2], candidates[3]));
  }
  PrintSettings(settings, engine->options().thread_count);
}

double ProcessorSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Another process measures a peer in turn with this one.
void ServeTurns(const Settings& settings) {
  const std::unique_ptr<LossEngine> engine = ValueOrFail(CreateCpuEngine({}));
  std::printf("%s\n", DescribeCpuProducts(engine->options().bfloat16_products).c_str());
  std::fflush(stdout);
  struct Case {
    Case(const Settings& settings, DataType type, LossEngine& engine)
        : rows(settings, type), head(MakeHead(engine, SpecOf(settings, type))) {}
    Rows rows;
    const std::unique_ptr<EngineHead> head;
  };
  std::map<std::string, Case> cases;
  for (std::string name; std::getline(std::cin, name);) {
    if (name != "float32" && name != "bfloat16") Fail("unknown case " + name);
    const DataType type = name == "float32" ? DataType::kFloat32 : DataType::kBFloat16;
    Case& own = cases.try_emplace(name, settings, type, *engine).first->second;
    const auto start = std::chrono::steady_clock::now();
    const double processor_start = ProcessorSeconds();
    Compute(*engine, *own.head, own.rows);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%.6f %.6f\n", seconds, ProcessorSeconds() - processor_start);
    std::fflush(stdout);
  }
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
  // glibc's default, fixed: freeing a large temporary would raise it, and what the process holds would follow from its history.
  mallopt(M_TRIM_THRESHOLD, 128 << 10);
  // The memory of any way: rows and weight in their type, gradients of rows (same type) and weight (fp32).
  const int64_t row_elements = settings.rows * settings.hidden_size;
  const int64_t weight_elements = settings.vocab_size * settings.hidden_size;
  const int64_t element_bytes = ElementBytes(settings.type);
  const int64_t tensors = 2 * row_elements * element_bytes + weight_elements * (element_bytes + 4);
  // Before the baseline: oneDNN's code, as PyTorch's is; and rows, since making them takes temporary memory that is not the
  // engine's.
  cpu::GetBfloat16Library();
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
  const headwater::bench::Settings settings = headwater::bench::ParseFlags(argc, argv, {"time", "turns", "commit", "memory"});
  if (settings.measure == "time") {
    headwater::bench::MeasureTime(settings);
  } else if (settings.measure == "turns") {
    headwater::bench::ServeTurns(settings);
  } else if (settings.measure == "commit") {
    headwater::bench::MeasureCommit(settings);
  } else {
    headwater::bench::MeasureMemory(settings);
  }
  return 0;
}
