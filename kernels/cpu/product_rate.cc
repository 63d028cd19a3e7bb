#include "headwater/kernels/product_rate.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

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
};

}  // namespace

double MeasureCpuProductRate(int32_t thread_count) {
  using Clock = std::chrono::steady_clock;
  const cpu::SingleThreadedBlas single_threaded;
  const size_t threads = static_cast<size_t>(std::max(thread_count, 1));
  std::vector<Operands> operands(threads);
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const Clock::time_point start = Clock::now();
    std::vector<std::thread> workers;
    for (Operands& own : operands) {
      workers.emplace_back([&own] {
        cpu::MultiplyTransposed(kRows, kColumns, kDepth, cpu::Matrix<const float>{own.a.data(), kDepth},
                                cpu::Matrix<const float>{own.b.data(), kDepth}, cpu::Matrix<float>{own.c.data(), kColumns});
      });
    }
    for (std::thread& worker : workers) worker.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (seconds > 0) best = std::max(best, 2.0 * kRows * kColumns * kDepth * static_cast<double>(threads) / seconds);
  }
  return best;
}

}  // namespace headwater
