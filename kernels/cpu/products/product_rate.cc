#include "headwater/kernels/product_rate.h"

#include <time.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "headwater/kernels/machine_limits.h"
#include "kernels/cpu/products/bfloat16_products.h"
#include "kernels/cpu/products/blas.h"

namespace headwater {
namespace {

// Large enough that the product, not its set-up, takes the time; small enough for a core's cache, as the engine's panels are.
constexpr int64_t kRows = 256;
constexpr int64_t kColumns = 512;
constexpr int64_t kDepth = 512;
constexpr int kRounds = 4;  // the first one warms up

template <typename T>
struct Operands {
  explicit Operands(T half) : a(kRows * kDepth, half), b(kColumns * kDepth, half), c(kRows * kColumns) {}
  std::vector<T> a;
  std::vector<T> b;
  std::vector<float> c;
  double rate = 0;  // of the last product
};

// Processor time of this thread.
double ThreadSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <typename T>
double Measure(size_t threads, T half) {
  std::vector<Operands<T>> operands(threads, Operands<T>(half));
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> workers;
    for (Operands<T>& own : operands) {
      workers.emplace_back([&own] {
        const double start = ThreadSeconds();
        cpu::MultiplyTransposed(kRows, kColumns, kDepth, cpu::Matrix<const T>{own.a.data(), kDepth},
                                cpu::Matrix<const T>{own.b.data(), kDepth}, cpu::Matrix<float>{own.c.data(), kColumns});
        own.rate = 2.0 * kRows * kColumns * kDepth / std::max(ThreadSeconds() - start, 1e-9);
      });
    }
    for (std::thread& worker : workers) worker.join();
    double rate = 0;
    for (const Operands<T>& own : operands) rate += own.rate;
    best = std::max(best, rate);
  }
  // More threads than processors compute no more.
  return best * std::min(1.0, ProcessorLimit() / static_cast<double>(threads));
}

}  // namespace

double MeasureCpuProductRate(int32_t thread_count, Bfloat16Products products) {
  const size_t threads = static_cast<size_t>(std::max(thread_count, 1));
  if (products == Bfloat16Products::kOneDnn) {
    constexpr uint16_t kHalf = 0x3F00;
    return cpu::GetBfloat16Library().is_usable ? Measure<uint16_t>(threads, kHalf) : 0;
  }
  const cpu::SingleThreadedBlas single_threaded;
  return Measure<float>(threads, 0.5F);
}

Bfloat16Products ChooseBfloat16Products(const EngineOptions& options) {
  if (options.bfloat16_products != Bfloat16Products::kAuto) return options.bfloat16_products;
  if (!cpu::GetBfloat16Library().is_usable) return Bfloat16Products::kOpenBlas;
  if (options.deterministic || options.group.world_size > 1) return Bfloat16Products::kOneDnn;
  static const bool is_faster =
      MeasureCpuProductRate(1, Bfloat16Products::kOneDnn) > MeasureCpuProductRate(1, Bfloat16Products::kOpenBlas);
  return is_faster ? Bfloat16Products::kOneDnn : Bfloat16Products::kOpenBlas;
}

std::string DescribeCpuProducts(Bfloat16Products chosen, Bfloat16Products asked) {
  const cpu::Bfloat16Library& library = cpu::GetBfloat16Library();
  const std::string fp32 = "fp32 products by OpenBLAS (" + cpu::BlasKernels() + "), bf16 products by ";
  if (chosen == Bfloat16Products::kOneDnn) return fp32 + library.name;
  if (asked == Bfloat16Products::kOpenBlas) return fp32 + "OpenBLAS, as asked";
  return fp32 + "OpenBLAS: " + (library.is_usable ? library.name + " is not faster" : library.why_not);
}

}  // namespace headwater
