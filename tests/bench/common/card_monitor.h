// Clock, power, temperature and throttle reasons of the GPU while something runs: a time on a power-limited card means nothing
// without them.
#ifndef HEADWATER_TESTS_BENCH_COMMON_CARD_MONITOR_H_
#define HEADWATER_TESTS_BENCH_COMMON_CARD_MONITOR_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace headwater::bench {

// Means over the samples of an interval; all 0 where NVML is not there.
struct CardState {
  double sm_mhz = 0;
  double watts = 0;
  double celsius = 0;
  uint64_t throttle_reasons = 0;  // NVML's bits, all that were seen
  int sample_count = 0;
};

// Samples a GPU every 20 ms on a thread of its own. NVML is opened at run time; nothing is ever set.
class CardMonitor {
 public:
  // `pci_bus_id` as CUDA prints it, empty where there is no GPU: nothing is sampled then.
  explicit CardMonitor(const std::string& pci_bus_id);
  CardMonitor(const CardMonitor&) = delete;
  CardMonitor& operator=(const CardMonitor&) = delete;
  ~CardMonitor();

  // Forgets what was sampled.
  void Begin();
  // The samples since Begin().
  CardState End() const;

 private:
  bool Open(const std::string& pci_bus_id);
  void Sample();

  void* library_ = nullptr;
  void* device_ = nullptr;
  int (*clock_)(void*, unsigned, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
  int (*temperature_)(void*, unsigned, unsigned*) = nullptr;
  int (*reasons_)(void*, unsigned long long*) = nullptr;
  mutable std::mutex mutex_;
  CardState sums_;  // guarded by mutex_: sums, not means
  std::atomic<bool> done_{false};
  std::thread thread_;
};

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_COMMON_CARD_MONITOR_H_
