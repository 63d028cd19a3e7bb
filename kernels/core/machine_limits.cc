#include "headwater/kernels/machine_limits.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace headwater {
namespace {

constexpr int kMostProcessors = 1 << 16;

// The first number in a file; `otherwise` if there is no file or it begins with none ("max").
double ReadNumber(const std::string& path, double otherwise) {
  std::ifstream file(path);
  double value = 0;
  return file >> value ? value : otherwise;
}

// Calls `visit` with the folder of this process's group of `controller`, and of each group above that one.
void ForEachGroup(const ControlGroups& groups, const std::string& controller,
                  const std::function<void(const std::string& folder)>& visit) {
  std::ifstream membership(groups.membership);
  for (std::string line; std::getline(membership, line);) {  // ID:CONTROLLER,CONTROLLER:PATH
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = absl::StrCat(",", line.substr(first + 1, second - first - 1), ",");
    const bool is_version2 = controllers == ",,";
    if (!is_version2 && !absl::StrContains(controllers, absl::StrCat(",", controller, ","))) continue;
    const std::string mount = is_version2 ? groups.root : absl::StrCat(groups.root, "/", controller);
    std::string path = line.substr(second + 1);
    while (!path.empty() && path.back() == '/') path.pop_back();
    visit(mount + path);
    while (!path.empty()) {
      path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
      visit(mount + path);
    }
  }
}

// Processors of this thread's affinity mask.
int AffinityCount() {
  for (int size = 1024; size <= kMostProcessors; size *= 2) {  // the kernel refuses a mask that is smaller than its own
    cpu_set_t* const mask = CPU_ALLOC(static_cast<size_t>(size));
    if (mask == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(size));
    const bool is_known = sched_getaffinity(0, bytes, mask) == 0;
    const bool is_too_small = !is_known && errno == EINVAL;
    const int count = is_known ? CPU_COUNT_S(bytes, mask) : 0;
    CPU_FREE(mask);
    if (is_known) return std::max(count, 1);
    if (!is_too_small) break;
  }
  return static_cast<int>(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L));
}

}  // namespace

double ProcessorLimit(const ControlGroups& groups) {
  double limit = AffinityCount();
  ForEachGroup(groups, "cpu", [&limit](const std::string& folder) {
    double quota = -1;  // none
    double period = 0;
    std::ifstream version2(folder + "/cpu.max");
    if (!(version2 >> quota >> period)) {
      quota = ReadNumber(folder + "/cpu.cfs_quota_us", -1);
      period = ReadNumber(folder + "/cpu.cfs_period_us", 0);
    }
    if (quota > 0 && period > 0) limit = std::min(limit, quota / period);
  });
  return limit;
}

int32_t ComputeThreads(const ControlGroups& groups) { return static_cast<int32_t>(std::ceil(ProcessorLimit(groups))); }

int64_t MemoryLimitBytes(const ControlGroups& groups) {
  int64_t limit = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  ForEachGroup(groups, "memory", [&limit](const std::string& folder) {
    for (const char* file : {"/memory.max", "/memory.limit_in_bytes"}) {
      const double bytes = ReadNumber(folder + file, 0);
      if (bytes > 0 && bytes < static_cast<double>(limit)) limit = static_cast<int64_t>(bytes);
    }
  });
  return limit;
}

}  // namespace headwater
