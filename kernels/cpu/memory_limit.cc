#include "kernels/cpu/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

namespace headwater::cpu {
namespace {

// The number in a file; no limit if there is no file or no number ("max").
int64_t ReadLimit(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value && value > 0 ? value : std::numeric_limits<int64_t>::max();
}

// Limits of this process's control group and of those above it, version 2 and version 1.
int64_t CgroupLimit() {
  int64_t limit = std::min(ReadLimit("/sys/fs/cgroup/memory.max"), ReadLimit("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const bool version2 = line.rfind("0::", 0) == 0;
    const size_t memory = line.find(":memory:");
    if (!version2 && memory == std::string::npos) continue;
    std::string path = version2 ? line.substr(3) : line.substr(memory + 8);
    for (; path.size() > 1; path = path.substr(0, path.find_last_of('/'))) {
      limit = std::min(limit, version2 ? ReadLimit("/sys/fs/cgroup" + path + "/memory.max")
                                       : ReadLimit("/sys/fs/cgroup/memory" + path + "/memory.limit_in_bytes"));
    }
  }
  return limit;
}

}  // namespace

int64_t MemoryLimitBytes() {
  const int64_t physical = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  return std::min(physical, CgroupLimit());
}

std::string ProcessorModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace headwater::cpu
