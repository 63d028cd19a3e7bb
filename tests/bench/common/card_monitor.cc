#include "tests/bench/common/card_monitor.h"

#include <dlfcn.h>

#include <chrono>

namespace headwater::bench {
namespace {

// NVML's numbers: its header need not be there.
constexpr unsigned kSmClock = 1;
constexpr unsigned kGpuTemperature = 0;

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

CardMonitor::CardMonitor(const std::string& pci_bus_id) {
  if (pci_bus_id.empty() || !Open(pci_bus_id)) return;
  thread_ = std::thread([this] {
    while (!done_) {
      Sample();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
}

CardMonitor::~CardMonitor() {
  done_ = true;
  if (thread_.joinable()) thread_.join();
}

bool CardMonitor::Open(const std::string& pci_bus_id) {
  library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (library_ == nullptr) return false;
  int (*init)() = nullptr;
  int (*by_bus)(const char*, void**) = nullptr;
  return Find(library_, "nvmlInit_v2", &init) && Find(library_, "nvmlDeviceGetHandleByPciBusId_v2", &by_bus) &&
         Find(library_, "nvmlDeviceGetClockInfo", &clock_) && Find(library_, "nvmlDeviceGetPowerUsage", &power_) &&
         Find(library_, "nvmlDeviceGetTemperature", &temperature_) &&
         Find(library_, "nvmlDeviceGetCurrentClocksThrottleReasons", &reasons_) && init() == 0 &&
         by_bus(pci_bus_id.c_str(), &device_) == 0;
}

void CardMonitor::Sample() {
  unsigned mhz = 0;
  unsigned milliwatt = 0;
  unsigned celsius = 0;
  unsigned long long reasons = 0;
  if (clock_(device_, kSmClock, &mhz) != 0 || power_(device_, &milliwatt) != 0 ||
      temperature_(device_, kGpuTemperature, &celsius) != 0 || reasons_(device_, &reasons) != 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  sums_.sm_mhz += mhz;
  sums_.watts += milliwatt / 1000.0;
  sums_.celsius += celsius;
  sums_.throttle_reasons |= reasons;
  ++sums_.sample_count;
}

void CardMonitor::Begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  sums_ = {};
}

CardState CardMonitor::End() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  CardState state = sums_;
  if (state.sample_count == 0) return state;
  state.sm_mhz /= state.sample_count;
  state.watts /= state.sample_count;
  state.celsius /= state.sample_count;
  return state;
}

}  // namespace headwater::bench
