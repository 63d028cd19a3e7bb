// The laboratory's clock: sustained and burst times of GPU work under a power limit, with the state of the card beside them.
//
// A Hopper card at 700 W is power-limited: the first 60-100 ms after idle run up to 15 % faster than the steady state, so a time
// without its regime means nothing. MeasureSustained() keeps the card at full load, runs the candidates in alternating blocks
// (floor, a, b, floor, a, b, ..., floor) and ranks by the median of each block's ratio to the floor blocks on either side of it.
// MeasureBurst() lets the card idle for two seconds and times the first 60 ms.
//
// Host code of the experiments only: errors end the program with a message, which is right for a laboratory and for nothing else.

#ifndef HEADWATER_KERNELS_LAB_BENCH_CUH_
#define HEADWATER_KERNELS_LAB_BENCH_CUH_

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#define LAB_CUDA(expression)                                                                                    \
  do {                                                                                                          \
    const cudaError_t lab_status = (expression);                                                                \
    if (lab_status != cudaSuccess) {                                                                            \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expression, cudaGetErrorString(lab_status)); \
      std::exit(1);                                                                                             \
    }                                                                                                           \
  } while (0)

namespace headwater::lab {

// A device array that lives as long as the object. Fresh memory is filled with 0xff bytes (NaN as float and as bf16), so that an
// element nobody wrote cannot pass a check.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(int64_t count) : count_(count) {
    LAB_CUDA(cudaMalloc(&data_, static_cast<size_t>(count) * sizeof(T)));
    Poison();
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(static_cast<int64_t>(values.size())) {
    LAB_CUDA(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  void Poison() { LAB_CUDA(cudaMemset(data_, 0xff, bytes())); }
  void Zero() { LAB_CUDA(cudaMemset(data_, 0, bytes())); }
  T* get() const { return data_; }
  int64_t count() const { return count_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }
  std::vector<T> ToHost() const {
    std::vector<T> host(static_cast<size_t>(count_));
    LAB_CUDA(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

// Standard normal value number `index` of stream `seed`, the same on host and device.
__host__ __device__ inline float NormalAt(uint64_t seed, uint64_t index) {
  uint64_t state = (index + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
  state ^= state >> 31;
  const float u1 = (static_cast<float>(state >> 40) + 0.5f) * (1.0f / 16777216.0f);
  const float u2 = static_cast<float>(state & 0xffffff) * (1.0f / 16777216.0f);
  return sqrtf(-2.0f * logf(u1)) * cosf(6.2831853f * u2);
}

static __global__ void FillNormalKernel(__nv_bfloat16* out, int64_t count, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    out[i] = __float2bfloat16(scale * NormalAt(seed, static_cast<uint64_t>(i)));
  }
}

static __global__ void FillTargetsKernel(int32_t* out, int64_t count, int64_t vocab_size, uint64_t seed) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  uint64_t state = static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15ull + seed;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  out[i] = static_cast<int32_t>((state ^ (state >> 27)) % static_cast<uint64_t>(vocab_size));
}

inline void FillNormal(const DeviceArray<__nv_bfloat16>& array, uint64_t seed, float scale) {
  FillNormalKernel<<<1056, 256>>>(array.get(), array.count(), seed, scale);
  LAB_CUDA(cudaGetLastError());
}

inline void FillTargets(const DeviceArray<int32_t>& array, int64_t vocab_size, uint64_t seed) {
  FillTargetsKernel<<<static_cast<int>((array.count() + 255) / 256), 256>>>(array.get(), array.count(), vocab_size, seed);
  LAB_CUDA(cudaGetLastError());
}

// Sums of (a-b)^2 and b^2 in fp64; NaN anywhere gives NaN, which no `error <= bound` passes.
template <class A, class B>
static __global__ void DifferenceKernel(const A* a, const B* b, int64_t count, double* sums) {
  double difference = 0.0, reference = 0.0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const double x = static_cast<double>(static_cast<float>(a[i])), y = static_cast<double>(static_cast<float>(b[i]));
    difference += (x - y) * (x - y);
    reference += y * y;
  }
  atomicAdd(&sums[0], difference);
  atomicAdd(&sums[1], reference);
}

// ||a - b|| / ||b|| over two device arrays.
template <class A, class B>
double RelativeDifference(const A* a, const B* b, int64_t count) {
  DeviceArray<double> sums(2);
  sums.Zero();
  DifferenceKernel<<<528, 256>>>(a, b, count, sums.get());
  LAB_CUDA(cudaGetLastError());
  const std::vector<double> host = sums.ToHost();
  return std::sqrt(host[0] / host[1]);
}

// ||a - b|| / ||b|| over two host arrays.
template <class A>
double RelativeDifference(const std::vector<A>& a, const std::vector<double>& b) {
  double difference = 0.0, reference = 0.0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double delta = static_cast<double>(static_cast<float>(a[i])) - b[i];
    difference += delta * delta;
    reference += b[i] * b[i];
  }
  return std::sqrt(difference / reference);
}

// Prints one line of a check and remembers a failure for the exit status. Written so that NaN fails.
inline bool& AnyCheckFailed() {
  static bool failed = false;
  return failed;
}
inline bool Check(const std::string& what, double error, double bound) {
  const bool passed = error <= bound;
  std::printf("check %-64s %10.3e  (bound %.1e)  %s\n", what.c_str(), error, bound, passed ? "ok" : "FAILED");
  std::fflush(stdout);
  if (!passed) AnyCheckFailed() = true;
  return passed;
}

// Clock, power, temperature and throttle reasons of device 0, sampled every 20 ms by a thread of its own; NVML is opened at run
// time and left alone if absent. Reads only: no setting of the card is ever changed.
class CardMonitor {
 public:
  struct Average {
    double sm_mhz = 0.0;
    double watts = 0.0;
    double celsius = 0.0;
    uint64_t reasons = 0;  // union of NVML's clocks-event reasons over the interval
    int samples = 0;
  };

  CardMonitor() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    const auto init = reinterpret_cast<int (*)()>(dlsym(library_, "nvmlInit_v2"));
    const auto by_index = reinterpret_cast<int (*)(unsigned, void**)>(dlsym(library_, "nvmlDeviceGetHandleByIndex_v2"));
    clock_ = reinterpret_cast<int (*)(void*, unsigned, unsigned*)>(dlsym(library_, "nvmlDeviceGetClockInfo"));
    power_ = reinterpret_cast<int (*)(void*, unsigned*)>(dlsym(library_, "nvmlDeviceGetPowerUsage"));
    temperature_ = reinterpret_cast<int (*)(void*, unsigned, unsigned*)>(dlsym(library_, "nvmlDeviceGetTemperature"));
    reasons_ = reinterpret_cast<int (*)(void*, unsigned long long*)>(dlsym(library_, "nvmlDeviceGetCurrentClocksThrottleReasons"));
    if (init == nullptr || by_index == nullptr || clock_ == nullptr || power_ == nullptr || temperature_ == nullptr ||
        reasons_ == nullptr)
      return;
    if (init() != 0 || by_index(0, &device_) != 0) return;
    running_ = true;
    thread_ = std::thread([this] { Loop(); });
  }
  ~CardMonitor() {
    running_ = false;
    if (thread_.joinable()) thread_.join();
  }
  // Samples count between Begin() and End().
  void Begin() {
    mhz_sum_ = 0;
    milliwatt_sum_ = 0;
    celsius_sum_ = 0;
    reason_union_ = 0;
    samples_ = 0;
  }
  Average End() const {
    Average average;
    average.samples = samples_;
    if (average.samples == 0) return average;
    average.sm_mhz = static_cast<double>(mhz_sum_) / average.samples;
    average.watts = static_cast<double>(milliwatt_sum_) / average.samples / 1000.0;
    average.celsius = static_cast<double>(celsius_sum_) / average.samples;
    average.reasons = reason_union_;
    return average;
  }

 private:
  void Loop() {
    while (running_) {
      unsigned mhz = 0, milliwatt = 0, celsius = 0;
      unsigned long long reasons = 0;
      if (clock_(device_, 1, &mhz) == 0 && power_(device_, &milliwatt) == 0 && temperature_(device_, 0, &celsius) == 0 &&
          reasons_(device_, &reasons) == 0) {
        mhz_sum_ += mhz;
        milliwatt_sum_ += milliwatt;
        celsius_sum_ += celsius;
        reason_union_ |= reasons;
        ++samples_;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  void* library_ = nullptr;
  void* device_ = nullptr;
  int (*clock_)(void*, unsigned, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
  int (*temperature_)(void*, unsigned, unsigned*) = nullptr;
  int (*reasons_)(void*, unsigned long long*) = nullptr;
  std::atomic<bool> running_{false};
  std::atomic<uint64_t> mhz_sum_{0}, milliwatt_sum_{0}, celsius_sum_{0}, reason_union_{0};
  std::atomic<int> samples_{0};
  std::thread thread_;
};

struct Candidate {
  std::string name;
  std::function<void(cudaStream_t)> enqueue;  // one complete call, asynchronous, allocates nothing
  double flops = 0.0;                         // of one call; 0 if bytes are what counts
  double bytes = 0.0;                         // that one call must move through device memory; 0 if not stated
};

struct Timing {
  std::string name;
  double sustained_ms = 0.0;  // median over blocks
  double ratio = 0.0;         // median over blocks of time / neighbouring floor blocks
  double ratio_min = 0.0;
  double ratio_max = 0.0;
  double burst_ms = 0.0;  // 0 if not measured
  double sm_mhz = 0.0;
  double watts = 0.0;
};

struct BenchOptions {
  double warmup_seconds = 2.0;
  double block_seconds = 1.0;
  int rounds = 2;  // blocks per candidate; the floor gets one more
  bool burst = true;
};

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n == 0 ? 0.0 : (n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]));
}

class Bench {
 public:
  Bench() {
    LAB_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    LAB_CUDA(cudaEventCreate(&start_));
    LAB_CUDA(cudaEventCreate(&stop_));
  }
  cudaStream_t stream() const { return stream_; }

  // Milliseconds of one call, mean over `repeats` back-to-back calls.
  double TimeCalls(const Candidate& candidate, int repeats) {
    LAB_CUDA(cudaEventRecord(start_, stream_));
    for (int i = 0; i < repeats; ++i) candidate.enqueue(stream_);
    LAB_CUDA(cudaEventRecord(stop_, stream_));
    LAB_CUDA(cudaEventSynchronize(stop_));
    LAB_CUDA(cudaGetLastError());
    float ms = 0.0f;
    LAB_CUDA(cudaEventElapsedTime(&ms, start_, stop_));
    return static_cast<double>(ms) / repeats;
  }

  // Full load for `seconds`, so that what follows sees the steady state.
  void WarmUp(const Candidate& candidate, double seconds) {
    const double ms = TimeCalls(candidate, 2);
    TimeCalls(candidate, std::max(1, static_cast<int>(seconds * 1000.0 / ms)));
  }

  // candidates[0] is the floor. Prints one line per candidate and returns the timings in the same order.
  std::vector<Timing> Run(const std::string& title, const std::vector<Candidate>& candidates, const BenchOptions& options = {}) {
    const size_t n = candidates.size();
    std::vector<int> repeats(n);
    for (size_t i = 0; i < n; ++i) {
      const double ms = std::max(TimeCalls(candidates[i], 2), 1e-3);
      repeats[i] = std::clamp(static_cast<int>(options.block_seconds * 1000.0 / ms), 1, 20000);
    }
    WarmUp(candidates[0], options.warmup_seconds);
    std::vector<std::vector<double>> times(n);
    std::vector<double> mhz(n, 0.0), watts(n, 0.0);
    uint64_t reasons = 0;
    double celsius = 0.0;
    const auto block = [&](size_t i) {
      monitor_.Begin();
      times[i].push_back(TimeCalls(candidates[i], repeats[i]));
      const CardMonitor::Average state = monitor_.End();
      mhz[i] = state.sm_mhz;
      watts[i] = state.watts;
      celsius = state.celsius;
      reasons |= state.reasons;
    };
    for (int round = 0; round < options.rounds; ++round) {
      for (size_t i = 0; i < n; ++i) block(i);
    }
    block(0);
    std::vector<Timing> results(n);
    for (size_t i = 0; i < n; ++i) {
      std::vector<double> ratios;
      for (int round = 0; round < options.rounds; ++round) {
        const double floor = 0.5 * (times[0][round] + times[0][round + 1]);
        ratios.push_back(times[i][round] / floor);
      }
      results[i].name = candidates[i].name;
      results[i].sustained_ms = Median(times[i]);
      results[i].ratio = i == 0 ? 1.0 : Median(ratios);
      results[i].ratio_min = *std::min_element(ratios.begin(), ratios.end());
      results[i].ratio_max = *std::max_element(ratios.begin(), ratios.end());
      results[i].sm_mhz = mhz[i];
      results[i].watts = watts[i];
      if (options.burst) {
        std::this_thread::sleep_for(std::chrono::seconds(2));
        results[i].burst_ms = TimeCalls(candidates[i], std::max(1, static_cast<int>(60.0 / results[i].sustained_ms)));
      }
    }
    Print(title, candidates, results, celsius, reasons);
    return results;
  }

 private:
  static void Print(const std::string& title, const std::vector<Candidate>& candidates, const std::vector<Timing>& results,
                    double celsius, uint64_t reasons) {
    std::printf("\n== %s  (%.0f C, clock reasons 0x%llx)\n", title.c_str(), celsius, static_cast<unsigned long long>(reasons));
    std::printf("%-44s %10s %8s %17s %9s %9s %6s %6s\n", "", "sustained", "ratio", "spread", "rate", "burst", "MHz", "W");
    for (size_t i = 0; i < results.size(); ++i) {
      const Timing& t = results[i];
      char rate[32];
      if (candidates[i].flops > 0.0) {
        std::snprintf(rate, sizeof(rate), "%.0fTF", candidates[i].flops / t.sustained_ms * 1e-9);
      } else {
        std::snprintf(rate, sizeof(rate), "%.2fTB", candidates[i].bytes / t.sustained_ms * 1e-9);
      }
      std::printf("%-44s %8.3fms %8.4f  %.4f .. %.4f %9s %7.3fms %6.0f %6.0f\n", t.name.c_str(), t.sustained_ms, t.ratio,
                  t.ratio_min, t.ratio_max, rate, t.burst_ms, t.sm_mhz, t.watts);
    }
    std::fflush(stdout);
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
  CardMonitor monitor_;
};

// Prints what machine this ran on; first line of every experiment's output.
inline void PrintDevice(const char* experiment) {
  cudaDeviceProp properties;
  LAB_CUDA(cudaGetDeviceProperties(&properties, 0));
  int driver = 0, runtime = 0;
  LAB_CUDA(cudaDriverGetVersion(&driver));
  LAB_CUDA(cudaRuntimeGetVersion(&runtime));
  std::printf("# %s: %s, %d SMs, L2 %d MiB, driver API %d, runtime %d\n", experiment, properties.name,
              properties.multiProcessorCount, properties.l2CacheSize >> 20, driver, runtime);
  std::fflush(stdout);
}

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_BENCH_CUH_
