#include "headwater/kernels/product_rate.h"

#include <time.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "headwater/kernels/machine_limits.h"
#include "kernels/cpu/blas.h"

namespace headwater {
namespace {

// Large enough that the product, not its set-up, takes the time; small enough for a core's cache, as the engine's panels are.
constexpr int64_t kRows = 256;
constexpr int64_t kColumns = 512;
constexpr int64_t kDepth = 512;
constexpr int kRounds = 4;  // the first one warms up

struct Operands {
  std::vector<float> a = std::vector<float>(kRows * kDepth, 0.5F);
  std::vector<float> b = std::vector<float>(kColumns * kDepth, 0.25F);
  std::vector<float> c = std::vector<float>(kRows * kColumns);
  double rate = 0;  // of the last product
};

// What this thread has had of processors.
double ThreadSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

double MeasureCpuProductRate(int32_t thread_count) {
  const cpu::SingleThreadedBlas single_threaded;
  const size_t threads = static_cast<size_t>(std::max(thread_count, 1));
  std::vector<Operands> operands(threads);
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> workers;
    for (Operands& own : operands) {
      workers.emplace_back([&own] {
        const double start = ThreadSeconds();
        cpu::MultiplyTransposed(kRows, kColumns, kDepth, cpu::Matrix<const float>{own.a.data(), kDepth},
                                cpu::Matrix<const float>{own.b.data(), kDepth}, cpu::Matrix<float>{own.c.data(), kColumns});
        own.rate = 2.0 * kRows * kColumns * kDepth / std::max(ThreadSeconds() - start, 1e-9);
      });
    }
    for (std::thread& worker : workers) worker.join();
    double rate = 0;
    for (const Operands& own : operands) rate += own.rate;
    best = std::max(best, rate);
  }
  // More threads than processors compute no more.
  return best * std::min(1.0, ProcessorLimit() / static_cast<double>(threads));
}

}  // namespace headwater
